"""How a direct reduce-scatter of GPU tensors cuts its landings: within the setting, and enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_sdma import _C

MIB = 1 << 20
LEAST_ROOM = 128  # bytes of a peer's slice; kLeastRoom in collectives/device_reducer.cpp


@given(
    slice_bytes=st.integers(0, 1 << 34),
    most_bytes=st.integers(4096, 1 << 32),
    peers=st.integers(1, 63),
)
def test_they_keep_to_the_setting(slice_bytes: int, most_bytes: int, peers: int) -> None:
    room, landings = _C._landing_shape(slice_bytes, most_bytes, peers)
    assert room >= LEAST_ROOM and room % LEAST_ROOM == 0 and landings >= 1
    if most_bytes >= peers * LEAST_ROOM:
        assert room * landings * peers <= most_bytes
    else:
        assert (room, landings) == (LEAST_ROOM, 1)
    # No byte of them lies idle for good.
    assert room * (landings - 1) < max(slice_bytes, 1)


@pytest.mark.parametrize(
    ("slice_bytes", "most_bytes", "peers", "expected"),
    [
        (1600 * MIB, 64 * MIB, 1, (32 * MIB, 2)),
        (1600 * MIB, 512 * MIB, 1, (32 * MIB, 16)),
        (1600 * MIB, 64 * MIB, 3, (32 * MIB // 3 // 128 * 128, 2)),
        (64 * MIB, 64 * MIB, 1, (8 * MIB, 8)),
        (1 * MIB, 64 * MIB, 1, (1 * MIB, 1)),
        (0, 64 * MIB, 1, (128, 1)),
        (5000, 4096, 20, (128, 1)),  # two landings would be too much
    ],
)
def test_sizes(slice_bytes: int, most_bytes: int, peers: int, expected: tuple[int, int]) -> None:
    assert _C._landing_shape(slice_bytes, most_bytes, peers) == expected
