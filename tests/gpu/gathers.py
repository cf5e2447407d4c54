"""Random all-gathers on GPUs that only streams keep in order.

The cases are those of tests/group/random_gathers.py. Here the host waits for the device at the end
and not before: results are compared on the device. Each rank picks by dice of its own the stream of
a case and what goes on beside it (noise.py), and it drops a case's tensors as soon as the host has
called wait().
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from groups import calls_by_route
from noise import Noise
from random_gathers import GUARD_BYTE, MOST_BYTES, Case, Gather, Pool, draw

MOST_PENDING_BYTES = 160 << 20
BESIDE = ("all_reduce", "all_reduce async", "broadcast")
BESIDE_EVERY = 4  # cases: gloo's collectives hold the host up


class Checked(Gather):
    """A case whose result is compared on the device, and the other collectives issued behind it."""

    def __init__(self, case: Case, pool: Pool, members: list[int], rank: int) -> None:
        super().__init__(case, pool, len(members), members.index(rank), torch.device("cuda"))
        self._members = members
        self._beside: list[tuple[Any, torch.Tensor, int]] = []  # Work, result, expected value

    def issue_beside(self, name: str, group: dist.ProcessGroup) -> None:
        n, number = len(self._members), self.case.number
        x = torch.full((5,), number + self.rank, dtype=torch.int64, device="cuda")
        if name == "broadcast":
            work = dist.broadcast(x, self._members[number % n], group)
            self._beside.append((work, x, number + number % n))
        else:
            work = dist.all_reduce(x, group=group, async_op=name.endswith("async"))
            self._beside.append((work, x, n * number + n * (n - 1) // 2))

    def count_wrong(self, wrong: torch.Tensor) -> None:
        """Completes the case and adds to `wrong`, an int64 scalar, how many bytes are wrong."""
        if self.work is not None:
            self.work.wait()
        if self.case.overwrite:
            for own in self.inputs:
                own.view(torch.uint8).fill_(0x5A)
        for outputs, expected in zip(self.outputs, self.expected, strict=True):
            for peer, (output, right) in enumerate(zip(outputs, expected, strict=True)):
                if peer == self.rank and self.case.in_place and self.case.overwrite:
                    continue
                wrong += torch.count_nonzero(output.view(torch.uint8) != right)
        for guard in self.guards:
            wrong += torch.count_nonzero(guard != GUARD_BYTE)
        for work, x, value in self._beside:
            if work is not None:
                work.wait()
            wrong += torch.count_nonzero(x != value)


class Runner:
    """Runs cases on this rank, over the default group's ranks and, of more than two, over pairs.

    `late` makes this host sleep now and then, longer than its peers' default patience.
    """

    def __init__(self, seed: int, late: bool) -> None:
        world, self.rank = dist.get_world_size(), dist.get_rank()
        members = [range(world)]
        if world > 2:
            members += [sorted((r, (r + 1) % world)) for r in range(world)]
        self.members = [list(ranks) for ranks in members]
        self.groups = [dist.new_group(ranks, backend="cuda:sdma") for ranks in self.members]
        self.seed = seed
        self.late = late
        self.dice = random.Random(f"{seed} {self.rank}")
        self.noise = Noise(self.dice)
        self.pool = Pool(seed, MOST_BYTES, torch.device("cuda"))
        self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.pending: deque[tuple[Checked, torch.cuda.Stream]] = deque()
        self.wrong = torch.empty(0)
        device = torch.cuda.current_device()
        self.thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))

    def run(self, cases: int) -> Counter[str]:
        """Runs cases [0, cases). Returns the number of calls by route; raises if one is wrong."""
        self.wrong = torch.zeros(cases, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        sizes = [len(ranks) for ranks in self.members]
        for number in range(cases):
            if number % 250 == 0:
                print("case", number, flush=True)  # told where the process dies
            case = draw(self.seed, number, sizes, MOST_BYTES)
            if self.rank in self.members[case.group]:
                self._run(case)
        self._complete(0)
        torch.cuda.synchronize()
        self._report(sizes)
        pairs = zip(self.groups, self.members, strict=True)
        return calls_by_route(*(group for group, ranks in pairs if self.rank in ranks))

    def _run(self, case: Case) -> None:
        if self.late and self.dice.random() < 0.1:
            time.sleep(0.02)
        stream = self.dice.choice(self.streams)
        group = self.groups[case.group]
        with torch.cuda.stream(stream):
            self.noise()
            gather = Checked(case, self.pool, self.members[case.group], self.rank)
            self.noise()
            if case.thread == 0:
                gather.issue(group)
            else:
                self.thread.submit(issue_on, stream, gather, group).result()
            if case.number % BESIDE_EVERY == 0:
                for name in case.beside:
                    if name in BESIDE:
                        gather.issue_beside(name, group)
            self.noise()
        self.pending.append((gather, stream))
        del gather
        self._complete(case.pending, case.out_of_turn)

    def _complete(self, most: int, out_of_turn: bool = False) -> None:
        """Completes pending cases until `most`, of a bounded number of bytes, are left."""
        while len(self.pending) > most or (
            self.pending and sum(gather.bytes for gather, _ in self.pending) > MOST_PENDING_BYTES
        ):
            gather, stream = self.pending.pop() if out_of_turn else self.pending.popleft()
            with torch.cuda.stream(stream):
                gather.count_wrong(self.wrong[gather.case.number])

    def _report(self, sizes: list[int]) -> None:
        wrong = {number: count for number, count in enumerate(self.wrong.tolist()) if count}
        if wrong:
            first = min(wrong)
            raise AssertionError(
                f"rank {self.rank}: seed {self.seed}: {len(wrong)} cases of {len(self.wrong)} are "
                f"wrong, the first is case {first}, by {wrong[first]} bytes: "
                f"{draw(self.seed, first, sizes, MOST_BYTES)}"
            )


def issue_on(stream: torch.cuda.Stream, gather: Checked, group: dist.ProcessGroup) -> None:
    with torch.cuda.stream(stream):
        gather.issue(group)


def run_cases(seed: int, cases: int, late: bool = False) -> Counter[str]:
    return Runner(seed, late).run(cases)
