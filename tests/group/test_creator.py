"""What a group says of itself when it is made, and how its settings reach it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, run_ranks


def log_of_two_gathers():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("pg_sdma")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(1))
    return lines


@pytest.mark.parametrize(("enabled", "route"), [("on", "direct"), ("off", "PG_SDMA=off")])
def test_rank_0_logs_once_which_way_a_group_goes(enabled, route):
    (line,), silent = run_ranks(2, log_of_two_gathers, env={"PG_SDMA": enabled})
    assert route in line
    assert silent == []


def backend_name():
    return dist.group.WORLD._get_backend(torch.device("cpu")).name()


def test_a_wrong_setting_stops_init_process_group():
    with pytest.raises(RanksFailed, match=r"PG_SDMA_RING='many' is not allowed"):
        run_ranks(2, backend_name, env={"PG_SDMA_RING": "many"})
