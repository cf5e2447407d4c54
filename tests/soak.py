"""Groups under load for as long as one likes: `make soak MINUTES=n`, or

    python tests/soak.py --minutes 10 --ranks 3 [--seed n]

Ranks, one process each, draw the same actions from one seed: collectives of random kind, size,
dtype and group, synchronous or not; training steps; groups made and destroyed. Each rank draws
delays of its own, and the parent stops (SIGSTOP) one for a moment now and then. Every result is
checked bit for bit. At the end descriptors, threads and memory are compared with what they were
after the first tenth of the time: the first two have to be flat, memory but for 32 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.int16)
MOST_ELEMENTS = 1 << 17
MOST_GROUPS = 4  # besides the default one
# Of memory of the process's own, that is no leak yet.
GROWTH_MB = 32


class Rank:
    """What one rank does. `common` is drawn from alike on all ranks, `own` is not."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world = rank, world
        self.common = random.Random(seed)
        self.own = random.Random(seed * 1000 + rank)
        self.groups: list[Any] = [None]  # None: the default group
        self.pending: list[tuple[Any, Callable[[], None]]] = []
        self.calls = 0
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 64)

    def act(self) -> None:
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.02)
        actions = [self.gather, self.gather_list, self.reduce, self.broadcast, self.train]
        weights = [12, 3, 3, 2, 1]
        if self.common.random() < 0.01:
            self.change_groups()
            return
        [action] = self.common.choices(actions, weights)
        work, check = action(self.common.choice(self.groups))
        self.calls += 1
        if work is None:
            check()
            return
        self.pending.append((work, check))
        if len(self.pending) > 8 or self.common.random() < 0.2:
            self.settle()

    def settle(self) -> None:
        for work, check in self.pending:
            work.wait()
            check()
        self.pending.clear()

    def shard(self, rank: int, size: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
        start = (salt * 7 + rank * 31) % 97
        return torch.arange(start, start + size).remainder(101).to(dtype)

    def draw(self) -> tuple[int, torch.dtype, int, bool]:
        size = int(MOST_ELEMENTS ** self.common.random())
        return (
            size,
            self.common.choice(DTYPES),
            self.common.randrange(1000),
            self.common.random() < 0.5,
        )

    def shards(self, size: int, dtype: torch.dtype, salt: int) -> list[torch.Tensor]:
        return [self.shard(rank, size, dtype, salt) for rank in range(self.world)]

    def gather(self, group: Any) -> tuple[Any, Callable[[], None]]:
        size, dtype, salt, async_op = self.draw()
        shards = self.shards(size, dtype, salt)
        output = torch.full((size * self.world,), 113).to(dtype)
        input = shards[self.rank].clone()
        work = dist.all_gather_into_tensor(output, input, group, async_op=async_op)
        return work, lambda: self.same(output, torch.cat(shards), "all_gather_into_tensor")

    def gather_list(self, group: Any) -> tuple[Any, Callable[[], None]]:
        size, dtype, salt, async_op = self.draw()
        shards = self.shards(size, dtype, salt)
        outputs = [torch.full((size,), 113).to(dtype) for _ in shards]
        work = dist.all_gather(outputs, shards[self.rank].clone(), group, async_op=async_op)
        return work, lambda: self.same(torch.cat(outputs), torch.cat(shards), "all_gather")

    def reduce(self, group: Any) -> tuple[Any, Callable[[], None]]:
        size, _, salt, async_op = self.draw()
        shards = self.shards(size, torch.int64, salt)
        value = shards[self.rank].clone()
        work = dist.all_reduce(value, group=group, async_op=async_op)
        return work, lambda: self.same(value, torch.stack(shards).sum(0), "all_reduce")

    def broadcast(self, group: Any) -> tuple[Any, Callable[[], None]]:
        size, _, salt, async_op = self.draw()
        source = self.common.randrange(self.world)
        right = self.shard(source, size, torch.int64, salt)
        value = right.clone() if source == self.rank else torch.zeros_like(right)
        work = dist.broadcast(value, source, group, async_op=async_op)
        return work, lambda: self.same(value, right, "broadcast")

    def train(self, group: Any) -> tuple[Any, Callable[[], None]]:
        """A step whose parameters are gathered from shards and whose gradients are summed."""
        self.settle()
        with torch.no_grad():
            flat = torch.cat([p.reshape(-1) for p in self.model.parameters()])
            size = flat.numel() // self.world
            whole = torch.empty(size * self.world)
            shard = flat[self.rank * size : (self.rank + 1) * size].clone()
            dist.all_gather_into_tensor(whole, shard, group)
            self.same(whole, flat[: size * self.world], "parameters")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(self.common.randrange(999)))
        self.model.zero_grad()
        self.model(x + self.rank).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.01 * parameter.grad / self.world
        return None, lambda: None

    def change_groups(self) -> None:
        self.settle()
        if len(self.groups) > MOST_GROUPS or (len(self.groups) > 1 and self.common.random() < 0.5):
            group = self.groups.pop(self.common.randrange(1, len(self.groups)))
            dist.barrier(group)  # gloo: no rank may still be connecting
            dist.destroy_process_group(group)
        else:
            self.groups.append(dist.new_group())
            dist.barrier(self.groups[-1])

    def same(self, got: torch.Tensor, right: torch.Tensor, what: str) -> None:
        if not torch.equal(got, right):
            raise AssertionError(f"rank {self.rank}: call {self.calls}: {what} is wrong")

    def belongings(self) -> dict[str, int]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what glibc's arenas keep of freed memory is no leak
        status = Path("/proc/self/status").read_text()
        # Without pages of files, which are resident or not as the kernel likes.
        own = [line for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "own MB": sum(int(line.split()[1]) for line in own) // 1024,
        }


def serve(rank: int, world: int, seed: int, seconds: float, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    import pg_sdma

    dist.init_process_group(
        "cpu:sdma",
        store=dist.TCPStore("127.0.0.1", port, world, is_master=False),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )
    self = Rank(rank, world, seed)
    before: dict[str, int] | None = None
    start = time.monotonic()
    going = True
    while going:
        for _ in range(200):
            self.act()
        self.settle()
        # All ranks stop at the same action: rank 0 says when.
        elapsed = torch.tensor([time.monotonic() - start])
        dist.broadcast(elapsed, 0)
        going = elapsed.item() < seconds
        if before is None and elapsed.item() > seconds / 10:
            while len(self.groups) > 1:
                group = self.groups.pop()
                dist.barrier(group)
                dist.destroy_process_group(group)
                del group
            before = self.belongings()
    while len(self.groups) > 1:
        group = self.groups.pop()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
    after = self.belongings()
    share = pg_sdma.fast_path_share()
    dist.barrier()
    dist.destroy_process_group()
    pipe.send((self.calls, share, before or after, after))


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    allowed = {"descriptors": 0, "threads": 0, "own MB": GROWTH_MB}
    return [
        f"{name}: {before[name]} -> {after[name]}"
        for name, most in allowed.items()
        if after[name] > before[name] + most
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.ranks} ranks, {options.minutes:g} minutes", flush=True)
    context = multiprocessing.get_context("spawn")
    stops = 0
    # Here, because a store keeps every key of every group that there ever was.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        arguments = (rank, options.ranks, options.seed, options.minutes * 60, store.port)
        process = context.Process(target=serve, args=(*arguments, there), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    moments = random.Random(options.seed)
    while all(process.is_alive() for process in processes):
        time.sleep(moments.uniform(0.5, 3))
        victim = moments.choice(processes)
        if not victim.is_alive():
            continue
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(victim.pid, signal.SIGCONT)
        stops += 1
    failed = False
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        process.join(150)
        if process.exitcode != 0 or not pipe.poll():
            print(f"rank {rank}: exit code {process.exitcode}")
            failed = True
            continue
        calls, share, before, after = pipe.recv()
        leaks = grown(before, after)
        failed = failed or bool(leaks)
        print(f"rank {rank}: {calls} calls, {share:.0%} of the last group's bytes direct, {after}")
        if leaks:
            print(f"rank {rank}: grew: {', '.join(leaks)}")
    for process in processes:
        process.kill()
    print(f"{stops} stops; {'FAILED' if failed else 'flat, and every result right'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
