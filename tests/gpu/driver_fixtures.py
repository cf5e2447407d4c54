"""Fixtures of tests that ask the driver itself: a plugin of pytest, which needs no conftest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_driver import Driver, Page
from driver_peer import Peer


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture
def page(driver: Driver) -> Iterator[Page]:
    page = Page(driver)
    yield page
    page.close()


@pytest.fixture
def peer(driver: Driver) -> Iterator[Peer]:
    peer = Peer(driver)
    yield peer
    peer.close()
