"""Groups that are made again on the store of those before, and what a vote asks of the store."""

from __future__ import annotations

import collections
import contextlib
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import new_store, run_ranks

RANKS = 3


def gather(group=None):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    output = torch.full((world,), -1.0)
    dist.all_gather_into_tensor(output, torch.full((1,), float(rank)), group)
    return output.tolist() == [float(r) for r in range(world)]


@contextlib.contextmanager
def inners_on_stores_of_their_own():
    """gloo takes the keys of a group before for its own, and cannot be made again on one store."""
    from pg_sdma import _inner

    made = _inner._gloo

    def make(opts):
        opts.store = new_store()
        return made(opts)

    with mock.patch.object(_inner, "_gloo", make):
        yield


def tcp_store():
    """One that all ranks share, and on which keys can be counted."""
    ports = new_store()
    if dist.get_rank() > 0:
        port = int(ports.get("port"))
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.set("port", str(store.port))
    return store


def make_default_groups(times):
    """Ranks differ in when they make a group; in every third one nothing goes direct."""
    import pg_sdma

    rank, world = dist.get_rank(), dist.get_world_size()
    store = tcp_store()
    dist.barrier()
    before = store.num_keys()
    dist.destroy_process_group()
    ways, right = [], []
    with inners_on_stores_of_their_own():
        for number in range(times):
            if number % 7 == rank:
                time.sleep(0.003)
            dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=world)
            if number % 3 != 1:
                right.append(gather())
                ways.append(pg_sdma.transports()["cpu"])
            else:
                dist.barrier()
            dist.destroy_process_group()
        dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=world)
        right.append(gather())
    dist.barrier()
    left = store.num_keys() - before
    dist.barrier()  # the store is rank 0's
    return ways, all(right), left


def test_200_default_groups_on_one_store_go_direct_and_leave_no_key():
    for ways, right, left in run_ranks(RANKS, make_default_groups, 200, timeout=120):
        assert right
        assert len(ways) == 133 and not [way for way in ways if way.startswith("inner")]
        assert left == 0


def make_local_groups(times):
    """Such a group has a name that is made of its ranks: each time the same."""
    import pg_sdma

    ways = []
    with inners_on_stores_of_their_own():
        for number in range(times):
            if number % 2 == dist.get_rank():
                time.sleep(0.005)
            group = dist.new_group([0, 1, 2], use_local_synchronization=True)
            assert gather(group)
            backend = group._get_backend(torch.device("cpu"))
            ways.append(backend.transports()["cpu"])
            dist.destroy_process_group(group)
    assert gather() and pg_sdma.transports()["cpu"]
    return ways


def test_a_group_with_local_synchronization_is_made_again():
    for ways in run_ranks(RANKS, make_local_groups, 20):
        assert not [way for way in ways if way.startswith("inner")]


def give_up_and_make_it_again(late):
    """Rank `late` votes in the first group when the others have made the second."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = tcp_store()
    dist.barrier()
    dist.destroy_process_group()
    with inners_on_stores_of_their_own():
        dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=world)
        first = dist.group.WORLD
        if rank == late:
            time.sleep(1.5)
        else:
            first.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(dist.DistBackendError) as error:
            gather()
        dist.destroy_process_group()
        dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=world)
        import pg_sdma

        return str(error.value), gather(), pg_sdma.transports()["cpu"]


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_comes_late_to_a_group_that_was_given_up_is_told(late):
    results = run_ranks(RANKS, give_up_and_make_it_again, late)
    for message, right, way in results:
        assert right and not way.startswith("inner")
        assert "the first direct operation of group 0" in message
        # Of rank `late`, or of one that has given up a moment before this one.
        assert re.search(r"ms in vain for rank \d", message)


class CountingStore(dist.Store):
    """Hands what it is asked to another store, and counts that."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.asked = collections.Counter()


def _counted(name):
    def ask(self, *args):
        self.asked[name] += 1
        return getattr(self.store, name)(*args)

    return ask


# torch looks for them at the class, and for one by its name in C++.
for _name in ("set", "get", "compare_set", "add", "delete_key", "check", "multi_get"):
    setattr(CountingStore, _name, _counted(_name))
CountingStore.deleteKey = CountingStore.delete_key


def count_requests():
    """What one vote asks of the store, without how often a rank looks whether keys are there."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = CountingStore(tcp_store())
    dist.barrier()
    dist.destroy_process_group()
    with inners_on_stores_of_their_own():
        dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=world)
        dist.barrier()  # so that nobody is waited for
        made = store.asked.copy()
        assert gather()
        dist.barrier()
    return store.asked - made


@pytest.mark.parametrize("world", [2, 6])
def test_what_a_vote_asks_of_the_store_grows_with_the_ranks_alone(world):
    first, *others = run_ranks(world, count_requests)
    for asked in others:
        asked.pop("check")
        assert asked.total() <= 20, asked
    first.pop("check")
    assert first.total() <= 20 + 4 * world, first
