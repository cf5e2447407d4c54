"""Every call of torch.distributed comes to the same on an sdma group as on a group of its inner.

The rows are in rows_*.py. A row runs on the ranks of both groups, with the same inputs. Where the
inner's group raises, ours raises the same type, or carries an all-gather that gloo refuses (for its
dtype or its shapes) and carries it right. PG_SDMA_TEST_DEVICE=cuda runs the table on GPUs.
"""

from __future__ import annotations

import pytest
import rows_collectives  # noqa: F401
import rows_functional  # noqa: F401
import rows_groups  # noqa: F401
import rows_messages  # noqa: F401
import torch
from rows import DEVICE, ROWS, Gathered, Raised, run_row

OURS = f"{DEVICE}:sdma"
INNERS = {"cpu": "cpu:gloo", "cuda": "cuda:nccl"}[DEVICE]


def assert_same(ours, inners):
    if isinstance(inners, Raised):
        assert isinstance(ours, Raised), f"raises on the inner: {inners}"
        assert ours.type == inners.type, (ours, inners)
        return
    assert not isinstance(ours, Raised), ours
    if isinstance(inners, torch.Tensor):
        torch.testing.assert_close(ours, inners, rtol=0, atol=0)
    elif isinstance(inners, (list, Gathered)):
        assert len(ours) == len(inners)
        for ours_branch, inners_branch in zip(ours, inners, strict=True):
            assert_same(ours_branch, inners_branch)
    else:
        assert ours == inners


def run(name):
    # Of this module, so that the ranks import it and with it the rows.
    return run_row(name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_row(ranks, name, size):
    ours = ranks(size, OURS).run(run, name)
    inners = ranks(size, INNERS).run(run, name)
    if isinstance(ours[0], Gathered) and isinstance(inners[0], Raised):
        inners = [Gathered(own.input, [peer.input for peer in ours]) for own in ours]
    assert_same(ours, inners)


@pytest.mark.parametrize("name", [name for name in ROWS if "reduce_scatter" in name])
def test_row_with_direct_reduce_scatters(ranks, name):
    ours = ranks(3, OURS, env={"PG_SDMA_OPS": "all_gather,reduce_scatter"})
    assert_same(ours.run(run, name), ranks(3, INNERS).run(run, name))
