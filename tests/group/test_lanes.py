"""The lanes of one backend object: which inner an operation reaches, and what is wrapped again.

torch's FakeProcessGroup, which works without a GPU, plays the accelerator's inner.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import new_store, run_ranks
from torch._C._distributed_c10d import AllgatherOptions, FakeProcessGroup

from pg_sdma import _extension

TIMEOUT = timedelta(seconds=30)


def make(rank, size, inners, store=None):
    store = store or dist.HashStore()
    return _extension.load().SdmaBackend(store, rank, size, inners, {}, "lanes", TIMEOUT)


def fake(rank=0, size=1):
    return FakeProcessGroup._create_internal(rank, size)


def gloo(rank=0, size=1, store=None):
    store = dist.PrefixStore("gloo", store or dist.HashStore())
    return dist.ProcessGroupGloo(store, rank, size, timeout=TIMEOUT)


def test_the_name_is_the_one_device_mesh_compares():
    assert make(0, 1, {"cpu": gloo()}).name() == "sdma"


def test_each_device_type_has_its_inner():
    backend = make(0, 1, {"cpu": gloo(), "cuda": fake()})
    assert backend.inner("cpu").name() == "gloo"
    assert backend.inner("cuda").name() == "fake"


def test_a_tensor_that_no_lane_serves():
    backend = make(0, 1, {"cuda": fake()})
    words = r"rank 0: broadcast: .* on cpu, .* serves cuda; name a backend"
    with pytest.raises(RuntimeError, match=words):
        backend.broadcast([torch.zeros(1)], dist.BroadcastOptions())


@pytest.mark.parametrize(("inners", "words"), [({}, "got none"), ({"cpu": fake(1, 2)}, "1 of 2")])
def test_inners_that_do_not_fit(inners, words):
    with pytest.raises(ValueError, match=words):
        make(0, 1, inners)


def test_names_of_the_inner_fall_through():
    backend = make(0, 1, {"cpu": gloo(), "cuda": fake()})
    assert isinstance(backend.options, FakeProcessGroup.Options)
    with pytest.raises(AttributeError, match="neither the sdma backend nor its inner fake"):
        _ = backend.no_such_name


def gather_beside_coalescing():
    """The accelerator's lane coalesces while the cpu's is given an all-gather and a message.

    Rank 1 joins when rank 0 waits for the Work of it all, which thus cannot be complete before.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = new_store()
    backend = make(rank, size, {"cpu": gloo(rank, size, store), "cuda": fake(rank, size)}, store)
    x, gathered = torch.full((3,), 5.0 * rank), [torch.zeros(3), torch.zeros(3)]
    if rank == 1:
        store.wait(["coalesced"])
    backend._start_coalescing()
    backend.allgather([gathered], [torch.full((3,), rank + 1.0)], AllgatherOptions())
    backend.send([x], 0, 0) if rank else backend.recv([x], 1, 0)
    work = backend._end_coalescing()
    store.set("coalesced", "")
    work.wait()
    return x.tolist(), torch.cat(gathered).tolist()


def test_a_coalesced_work_waits_for_every_lane():
    results = run_ranks(2, gather_beside_coalescing, backend=None)
    assert results == [([5.0] * 3, [1.0] * 3 + [2.0] * 3)] * 2


def barrier_behind_pending_operations():
    """Rank 0 comes late to an all-gather, so rank 1 has an all-reduce pending behind it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    output, x = torch.zeros(size), torch.ones(1)
    if rank == 0:
        time.sleep(0.3)
    works = [dist.all_gather_into_tensor(output, torch.full((1,), 1.0 + rank), async_op=True)]
    works.append(dist.all_reduce(x, async_op=True))
    if rank == 0:
        for work in works:
            work.wait()
    dist.group.WORLD.monitored_barrier(TIMEOUT)
    for work in works:
        work.wait()
    return output.tolist(), x.item()


def test_a_monitored_barrier_takes_its_turn():
    results = run_ranks(2, barrier_behind_pending_operations, timeout=20.0)
    assert results == [([1.0, 2.0], 2.0)] * 2


def split_and_name():
    part = dist.group.WORLD.split_group([0, 1], timeout=TIMEOUT, group_name="part")
    dist.barrier()  # no rank may drop its part while another still connects to it
    return part and part._get_backend(torch.device("cpu")).name()


def test_what_a_split_gives_is_wrapped_again():
    assert run_ranks(3, split_and_name) == ["sdma", "sdma", None]
