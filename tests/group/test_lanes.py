"""The lanes of one backend object: which inner an operation reaches, and what is wrapped again.

torch's FakeProcessGroup, which works without a GPU, plays the accelerator's inner.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import new_store, run_ranks
from torch._C._distributed_c10d import FakeProcessGroup

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
    words = r"\[rank 0\] sdma broadcast: .* on cpu, .* serves cuda; name a backend"
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


def receive_beside_coalescing():
    """Rank 0 coalesces on its accelerator lane and receives into a cpu tensor meanwhile."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = new_store()
    backend = make(rank, size, {"cpu": gloo(rank, size, store), "cuda": fake(rank, size)}, store)
    x = torch.zeros(3)
    if rank == 0:
        backend._start_coalescing()
        backend.recv([x], 1, 0)
        work = backend._end_coalescing()
        store.set("coalesced", "")
        work.wait()
    else:
        store.wait(["coalesced"])
        backend.send([x + 5], 0, 0).wait()
    return x.tolist()


def test_a_coalesced_work_waits_for_every_lane():
    assert run_ranks(2, receive_beside_coalescing, backend=None)[0] == [5.0, 5.0, 5.0]


def split_and_name():
    part = dist.group.WORLD.split_group([0, 1], timeout=TIMEOUT, group_name="part")
    return part and part._get_backend(torch.device("cpu")).name()


def test_what_a_split_gives_is_wrapped_again():
    assert run_ranks(3, split_and_name) == ["sdma", "sdma", None]
