"""What a rank of a soak does."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from soak_place import Cpu, Cuda

# Of the collectives that go to the inner, which are not what is tried here.
MOST_BESIDE = 1 << 17
MOST_GROUPS = 4  # besides the default one
MOST_PENDING = 8
MOST_DOUBTS = 32
FILL = 0x5A  # what an input is overwritten with once its gather is complete

# What an action leaves: the Work if asynchronous, and what to do once it is complete.
Issued = tuple[Any, Callable[[], None]]


class Rank:
    """`common` is drawn from alike on all ranks, `own` is not.

    A call's tensors are made, used and freed on one stream, which each rank picks for itself.
    """

    def __init__(self, rank: int, world: int, seed: int, own: random.Random, place: Cpu) -> None:
        self.rank, self.world = rank, world
        self.common, self.own = random.Random(seed), own
        self.place = place
        self.groups: list[Any] = [None]  # None: the default group
        # Number of the call, stream, Work, what to do then.
        self.pending: list[tuple[int, Any, Any, Callable[[], None]]] = []
        self.doubts: list[tuple[str, torch.Tensor]] = []  # what, and whether it is wrong
        self.calls = 0
        self.checking = 0  # the call whose result is compared
        self.generator = torch.Generator(place.device)
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 64).to(place.device)

    def act(self) -> None:
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.02)
        if self.common.random() < 0.01:
            self.change_groups()
            return
        actions = [self.gather, self.gather_list, self.reduce, self.broadcast, self.train]
        [action] = self.common.choices(actions, weights=[12, 3, 3, 2, 1])
        group = self.common.choice(self.groups)
        # The model's tensors are the default stream's.
        stream = self.place.streams[0] if action == self.train else self.pick_stream()
        with self.place.on(stream):
            self.place.disturb()
            self.calls += 1
            work, finish = action(group)
            if work is None:
                self.checking = self.calls
                finish()
                return
            self.place.disturb()
        self.pending.append((self.calls, stream, work, finish))
        if len(self.pending) > MOST_PENDING or self.common.random() < 0.2:
            self.settle()

    def pick_stream(self) -> Any:
        # The default one half of the time.
        streams = self.place.streams
        return streams[0] if self.own.random() < 0.5 else self.own.choice(streams)

    def settle(self) -> None:
        """Completes what is pending, in an order of this rank's own."""
        self.own.shuffle(self.pending)
        while self.pending:
            self.checking, stream, work, finish = self.pending.pop()
            with self.place.on(stream):
                work.wait()
                finish()
        if len(self.doubts) >= MOST_DOUBTS:
            self.verify()

    def same(self, got: torch.Tensor, right: torch.Tensor, what: str) -> None:
        """Has the device compare their bytes; verify() asks what came out."""
        wrong = (got.view(torch.uint8) != right.view(torch.uint8)).any()
        self.doubts.append((f"call {self.checking}: {what} of {got.numel()} {got.dtype}", wrong))

    def verify(self) -> None:
        """Raises AssertionError where anything compared so far was wrong."""
        if not self.doubts:
            return
        self.place.synchronize()
        wrong = torch.stack([flag for _, flag in self.doubts]).tolist()
        found = [what for (what, _), flag in zip(self.doubts, wrong, strict=True) if flag]
        self.doubts.clear()
        if found:
            raise AssertionError(f"rank {self.rank}: wrong are {'; '.join(found)}")

    # -- data

    def draw(self, most: int) -> tuple[int, torch.dtype, int, bool]:
        """Elements of a shard, dtype, what the data is made from, whether asynchronous."""
        return (
            int(most ** self.common.random()),
            self.common.choice(self.place.dtypes),
            self.common.getrandbits(40),
            self.common.random() < 0.5,
        )

    def shard(self, rank: int, size: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
        """Random bytes, the same on whichever rank they are made."""
        self.generator.manual_seed(salt * 64 + rank)
        words = -(-size * dtype.itemsize // 8)
        bits = torch.randint(
            -(2**63),
            2**63 - 1,
            (words,),
            dtype=torch.int64,
            device=self.place.device,
            generator=self.generator,
        )
        return bits.view(torch.uint8)[: size * dtype.itemsize].view(dtype)

    def shards(self, size: int, dtype: torch.dtype, salt: int) -> list[torch.Tensor]:
        return [self.shard(rank, size, dtype, salt) for rank in range(self.world)]

    # -- actions

    def gather(self, group: Any) -> Issued:
        size, dtype, salt, async_op = self.draw(self.place.most_elements)
        right = torch.cat(self.shards(size, dtype, salt))
        output = poisoned(right)
        mine = right[self.rank * size : (self.rank + 1) * size]
        in_place = self.own.random() < 0.5
        held = [output[self.rank * size :][:size] if in_place else torch.empty_like(mine)]
        held[0].copy_(mine)
        fate = self.own.choice(("kept", "overwritten", "freed"))
        work = dist.all_gather_into_tensor(output, held[0], group, async_op=async_op)

        def finish() -> None:
            input = held.pop()
            if fate == "overwritten":
                for tensor in (input, mine) if in_place else (input,):
                    tensor.view(torch.uint8).fill_(FILL)
            del input
            if fate == "freed":  # and taken by something else
                torch.empty_like(mine).view(torch.uint8).fill_(FILL)
            how = f"all_gather_into_tensor (in place: {in_place}, input {fate})"
            self.same(output, right, how)

        return work, finish

    def gather_list(self, group: Any) -> Issued:
        size, dtype, salt, async_op = self.draw(self.place.most_elements)
        shards = self.shards(size, dtype, salt)
        outputs = [poisoned(shard) for shard in shards]
        work = dist.all_gather(outputs, shards[self.rank].clone(), group, async_op=async_op)
        return work, lambda: self.same(torch.cat(outputs), torch.cat(shards), "all_gather")

    def reduce(self, group: Any) -> Issued:
        size, _, salt, async_op = self.draw(MOST_BESIDE)
        # int32's values, so that no sum overflows.
        shards = [shard.long() for shard in self.shards(size, torch.int32, salt)]
        value = shards[self.rank].clone()
        work = dist.all_reduce(value, group=group, async_op=async_op)
        return work, lambda: self.same(value, torch.stack(shards).sum(0), "all_reduce")

    def broadcast(self, group: Any) -> Issued:
        size, _, salt, async_op = self.draw(MOST_BESIDE)
        source = self.common.randrange(self.world)
        right = self.shard(source, size, torch.int64, salt)
        value = right.clone() if source == self.rank else poisoned(right)
        work = dist.broadcast(value, source, group, async_op=async_op)
        return work, lambda: self.same(value, right, "broadcast")

    def train(self, group: Any) -> Issued:
        """A step whose parameters are gathered from shards and whose gradients are summed."""
        self.settle()
        with torch.no_grad():
            flat = torch.cat([p.reshape(-1) for p in self.model.parameters()])
            size = flat.numel() // self.world
            whole = poisoned(flat[: size * self.world])
            shard = flat[self.rank * size : (self.rank + 1) * size].clone()
            dist.all_gather_into_tensor(whole, shard, group)
            self.checking = self.calls
            self.same(whole, flat[: size * self.world], "parameters")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(self.common.randrange(999)))
        self.model.zero_grad()
        self.model(x.to(self.place.device) + self.rank).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.01 * parameter.grad / self.world
        return None, lambda: None

    # -- groups

    def change_groups(self) -> None:
        self.settle()
        if len(self.groups) > MOST_GROUPS or (len(self.groups) > 1 and self.common.random() < 0.5):
            self.destroy(self.common.randrange(1, len(self.groups)))
        else:
            self.groups.append(dist.new_group())
            level(self.groups[-1])

    def destroy(self, index: int) -> None:
        group = self.groups.pop(index)
        self.place.synchronize()
        level(group)  # gloo: no rank may still be connecting
        dist.destroy_process_group(group)

    def inventory(self) -> dict[str, int]:
        """What the process owns when it holds nothing that it will not hold at any other time."""
        self.settle()
        self.verify()
        while len(self.groups) > 1:
            self.destroy(len(self.groups) - 1)
        self.model.zero_grad()
        self.place.give_back()
        level()  # so that all have given back
        found = self.place.belongings()
        level()  # so that all have looked
        return found


def poisoned(right: torch.Tensor) -> torch.Tensor:
    """A new tensor of which every byte is wrong."""
    return right.view(torch.uint8).bitwise_not().view(right.dtype)


def level(group: Any = None) -> None:
    """Blocks the host until every rank's host is here, and touches no GPU."""
    dist.all_reduce(torch.zeros(1), group=group)


def serve(rank: int, options: argparse.Namespace, port: int, pipe: Connection) -> None:
    """One rank, to its end. Sends calls, share of bytes that went direct, belongings twice."""
    torch.set_num_threads(1)
    import pg_sdma

    own = random.Random(options.seed * 1000 + rank)
    place = Cuda(rank, own) if options.device == "cuda" else Cpu()  # before the group: the device
    dist.init_process_group(
        place.backend,
        store=dist.TCPStore("127.0.0.1", port, options.ranks, is_master=False),
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=2),
    )
    self = Rank(rank, options.ranks, options.seed, own, place)
    self.train(None)  # what libraries and torch's threads take at first use
    before: dict[str, int] | None = None
    start = time.monotonic()
    seconds = options.minutes * 60
    going = True
    while going:
        for _ in range(200):
            self.act()
        self.settle()
        self.verify()
        # All ranks stop at the same action: rank 0 says when.
        elapsed = torch.tensor([time.monotonic() - start])
        dist.broadcast(elapsed, 0)
        going = elapsed.item() < seconds
        if before is None and elapsed.item() > seconds / 10:
            before = self.inventory()
    after = self.inventory()
    share = pg_sdma.fast_path_share()
    level()
    dist.destroy_process_group()
    pipe.send((self.calls, share, before or after, after))
