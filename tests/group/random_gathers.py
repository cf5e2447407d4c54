"""Random all-gathers, checked against bytes that every rank can compute.

    python tests/group/random_gathers.py --ranks 3 --cases 20000 --seed 7 --device cuda

A case is one all-gather: any form, dtype, size, number of tensors, alignment, group, in place or
not, synchronous or not, issued from one of two threads, with other collectives of the same group
around it and earlier cases still pending. All of it is drawn from (seed, number), so a failure
names what to run again.

Every output is poisoned with the complement of what has to arrive, so no byte can be right by
accident, and lies between guard bytes. Inputs are overwritten as soon as their case is complete,
half of the time. Small cases run on a group of the inner backend too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pg_sdma

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
FORMS = ("single", "list", "coalesced", "functional")
BESIDE = ("all_reduce", "all_reduce async", "broadcast", "barrier", "send and receive")

MOST_BYTES = 80 << 20  # of output, of one case
MOST_PENDING_BYTES = 160 << 20
INNER_BELOW = 1 << 20
GUARD = 64
GUARD_BYTE = 0xEE


@dataclass(frozen=True)
class Case:
    """One all-gather, as all ranks know it."""

    number: int
    group: int  # index among the groups
    form: str
    dtype: torch.dtype
    counts: tuple[int, ...]  # elements of one shard of each tensor
    shifts: tuple[int, ...]  # elements by which each tensor is off a 64-byte boundary
    in_place: bool
    asynchronous: bool
    pending: int  # how many cases may still be pending when this one has been issued
    out_of_turn: bool  # whether the newest of those completes first
    thread: int
    overwrite: bool
    beside: tuple[str, ...]  # other collectives that are issued right behind it

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.counts[:4])) + (", ..." if len(self.counts) > 4 else "")
        return (
            f"{self.form} all-gather of {len(self.counts)} {self.dtype} tensor(s) of {counts} "
            f"elements a rank, group {self.group}"
            + ", in place" * self.in_place
            + ", async" * self.asynchronous
        )


def draw(seed: int, number: int, sizes: list[int], most_bytes: int) -> Case:
    """Case `number` for groups of `sizes` ranks, of at most `most_bytes` of output."""
    dice = random.Random(f"{seed} {number}")
    group = dice.choice([0, 0, *range(len(sizes))])
    form = dice.choice(FORMS)
    dtype = dice.choice(DTYPES)
    tensors = 1
    if form == "coalesced":
        tensors = dice.randint(65, 140) if dice.random() < 0.05 else dice.randint(1, 40)
    total = 0 if dice.random() < 0.03 else int(math.exp(dice.uniform(0, math.log(most_bytes))))
    weights = [dice.random() for _ in range(tensors)]
    counts = tuple(
        int(total * weight / sum(weights)) // (sizes[group] * dtype.itemsize) for weight in weights
    )
    return Case(
        number=number,
        group=group,
        form=form,
        dtype=dtype,
        counts=counts,
        shifts=tuple(dice.choice([0, 0, 1, 3]) for _ in counts),
        in_place=dice.random() < 0.5,
        asynchronous=dice.random() < 0.5,
        pending=dice.choice([0, 0, 1, 2, 6]),
        out_of_turn=dice.random() < 0.3,
        thread=int(dice.random() < 0.25),
        overwrite=dice.random() < 0.5,
        beside=tuple(dice.sample(BESIDE, dice.choice([0, 0, 0, 1, 2]))),
    )


class Pool:
    """Where expected bytes come from: the same random bytes on every rank and device."""

    def __init__(self, seed: int, most_bytes: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.slack = 1 << 20
        length = most_bytes + self.slack
        bytes_ = torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)
        self.bytes = bytes_.to(device)

    def shard(self, case: int, tensor: int, rank: int, size: int) -> torch.Tensor:
        """The `size` bytes that `rank` contributes to a tensor of a case."""
        start = random.Random(f"{case} {tensor} {rank}").randrange(self.slack)
        return self.bytes[start : start + size]


class Gather:
    """One case on this rank: its tensors, and its Work while it is pending."""

    def __init__(self, case: Case, pool: Pool, ranks: int, rank: int, device: Any) -> None:
        self.case = case
        self.rank = rank
        self.work: Any = None
        self.guards: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[list[torch.Tensor]] = []  # by tensor, by rank
        self.wholes: list[torch.Tensor] = []
        self.expected: list[list[torch.Tensor]] = []
        self.device = device
        for index, count in enumerate(case.counts):
            size = count * case.dtype.itemsize
            whole = self._place(ranks * size, case.shifts[index])
            outputs = list(whole.split(size)) if size else [whole] * ranks
            expected = [pool.shard(case.number, index, r, size) for r in range(ranks)]
            for output, right in zip(outputs, expected, strict=True):
                torch.bitwise_not(right, out=output)
            own = outputs[rank] if case.in_place else self._place(size, case.shifts[index])
            own.copy_(expected[rank])
            self.inputs.append(own.view(case.dtype))
            self.wholes.append(whole.view(case.dtype))
            self.outputs.append([output.view(case.dtype) for output in outputs])
            self.expected.append(expected)

    def _place(self, size: int, shift: int) -> torch.Tensor:
        """`size` bytes between guards, `shift` elements off the allocation's alignment."""
        front = GUARD + shift * self.case.dtype.itemsize
        buffer = torch.empty(front + size + GUARD, dtype=torch.uint8, device=self.device)
        for guard in (buffer[:front], buffer[front + size :]):
            self.guards.append(guard.fill_(GUARD_BYTE))
        return buffer[front : front + size]

    @property
    def bytes(self) -> int:
        return sum(whole.nbytes for whole in self.wholes)

    def issue(self, group: dist.ProcessGroup) -> None:
        case = self.case
        if case.form == "list":
            self.work = dist.all_gather(
                self.outputs[0], self.inputs[0], group, async_op=case.asynchronous
            )
        elif case.form == "single":
            self.work = dist.all_gather_into_tensor(
                self.wholes[0], self.inputs[0], group, async_op=case.asynchronous
            )
        elif case.form == "functional":
            operation = torch.ops._c10d_functional.all_gather_into_tensor_out
            result = operation(self.inputs[0], group.size(), group.group_name, out=self.wholes[0])
            self.work = Functional(result)
        else:
            with dist._coalescing_manager(group, async_ops=case.asynchronous) as self.work:
                for whole, own in zip(self.wholes, self.inputs, strict=True):
                    dist.all_gather_into_tensor(whole, own, group)
            if not case.asynchronous:
                self.work = None

    def finish(self) -> str:
        """Completes the case. Returns what is wrong with it; empty when nothing is."""
        if self.work is not None:
            self.work.wait()
        if self.case.overwrite:
            for own in self.inputs:
                own.view(torch.uint8).fill_(0x5A)
        for index, (outputs, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            for peer, (output, right) in enumerate(zip(outputs, expected, strict=True)):
                if peer == self.rank and self.case.in_place and self.case.overwrite:
                    continue
                if wrong := difference(output.view(torch.uint8), right):
                    return f"tensor {index}, the shard of rank {peer} of its group: {wrong}"
        if any(not guard.eq(GUARD_BYTE).all() for guard in self.guards):
            return "bytes outside of the outputs were written"
        return ""


class Functional:
    """What a functional collective returns, as a Work."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def wait(self) -> None:
        torch.ops._c10d_functional.wait_tensor(self.result)


def difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(got, expected):
        return ""
    wrong = (got != expected).nonzero().flatten()
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(got)} bytes are wrong, the first at {at}: "
        f"got {int(got[at])}, expected {int(expected[at])}"
    )


class Runner:
    """Runs cases on this rank. The default group is up, with an sdma backend for `device`."""

    program = "random_gathers.py"
    draw = staticmethod(draw)

    def __init__(self, seed: int, most_bytes: int, device: str, spoiled: int = -1) -> None:
        self.seed = seed
        self.spoiled = spoiled  # the case in which rank 0 sends a wrong byte
        self.most_bytes = most_bytes
        world, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        inner = dist.group.WORLD._get_backend(self.device).inner(device).name()
        members = [list(range(world))]
        if world > 2:
            members += [[r, (r + 1) % world] for r in range(world)]
        self.members = [sorted(ranks) for ranks in members]
        self.groups = [dist.new_group(ranks, backend=f"{device}:sdma") for ranks in self.members]
        self.inners = [dist.new_group(ranks, backend=f"{device}:{inner}") for ranks in self.members]
        self.pool = Pool(seed, most_bytes, self.device)
        self.pending: deque[Gather] = deque()
        self.other_thread = ThreadPoolExecutor(1)
        streams = [torch.cuda.Stream() for _ in range(3)] if device == "cuda" else []
        self.streams = [None, *streams]

    def run(self, first: int, cases: int) -> dict[str, int]:
        """Runs cases [first, first + cases). Returns this rank's calls by route."""
        sizes = [len(ranks) for ranks in self.members]
        for number in range(first, first + cases):
            case = self.draw(self.seed, number, sizes, self.most_bytes)
            if self.rank in self.members[case.group]:
                with self._stream(case):
                    self._run(case)
        self._complete(0)
        routes: Counter[str] = Counter()
        for group, ranks in zip(self.groups, self.members, strict=True):
            if self.rank in ranks:
                for by_route in pg_sdma.stats(group).values():
                    routes.update({route: count["calls"] for route, count in by_route.items()})
        return dict(routes)

    @contextlib.contextmanager
    def _stream(self, case: Case) -> Iterator[None]:
        stream = self.streams[case.number % len(self.streams)]
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            yield

    def _gather(self, case: Any) -> Any:
        members = self.members[case.group]
        return Gather(case, self.pool, len(members), members.index(self.rank), self.device)

    def _run(self, case: Case) -> None:
        gather = self._gather(case)
        if case.number == self.spoiled and self.rank == 0:
            gather.inputs[0].view(torch.uint8)[:1].bitwise_not_()
        self._in_thread(case, gather.issue, self.groups[case.group])
        for name in case.beside:
            self._in_thread(case, self._beside, case, name)
        self.pending.append(gather)
        self._complete(case.pending, case.out_of_turn)
        if gather.bytes < INNER_BELOW:
            self._compare(case)

    def _compare(self, case: Case) -> None:
        """The same on the inner."""
        reference = self._gather(case)
        as_bytes = [t.view(torch.uint8) for t in reference.inputs]
        for own, outputs in zip(as_bytes, reference.outputs, strict=True):
            views = [output.view(torch.uint8) for output in outputs]
            dist.all_gather(views, own, self.inners[case.group])
        self._check(case, reference.finish(), "the inner: ")

    def _in_thread(self, case: Case, function: Any, *args: Any) -> None:
        if case.thread == 0:
            function(*args)
            return
        stream = self.streams[case.number % len(self.streams)]

        def call() -> None:
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                function(*args)

        self.other_thread.submit(call).result()

    def _complete(self, most: int, out_of_turn: bool = False) -> None:
        """Completes pending cases until `most`, of a bounded number of bytes, are left."""
        while len(self.pending) > most or (
            self.pending and sum(gather.bytes for gather in self.pending) > MOST_PENDING_BYTES
        ):
            gather = self.pending.pop() if out_of_turn else self.pending.popleft()
            with self._stream(gather.case):
                self._check(gather.case, gather.finish())

    def _check(self, case: Case, wrong: str, which: str = "") -> None:
        if wrong:
            world = len(self.members[0])
            raise AssertionError(
                f"rank {self.rank}: seed {self.seed}, case {case.number} ({case}): {which}{wrong}. "
                f"Run it again: python tests/group/{self.program} "
                f"--ranks {world} --seed {self.seed} --device {self.device.type} "
                f"--most-bytes {self.most_bytes} --first {max(0, case.number - 10)} --cases 20"
            )

    def _beside(self, case: Case, name: str) -> None:
        """Another collective, or a ring of messages, on the group of the case."""
        group, members = self.groups[case.group], self.members[case.group]
        n, me = len(members), members.index(self.rank)
        x = torch.full((5,), case.number + me, dtype=torch.int64, device=self.device)
        expected = n * case.number + n * (n - 1) // 2
        if name == "all_reduce":
            dist.all_reduce(x, group=group)
        elif name == "all_reduce async":
            dist.all_reduce(x, group=group, async_op=True).wait()
        elif name == "broadcast":
            expected = case.number + case.number % n
            dist.broadcast(x, members[case.number % n], group=group)
        elif name == "barrier":
            expected = case.number + me
            dist.barrier(group)
        else:
            expected = case.number + (me - 1) % n
            onwards = dist.P2POp(dist.isend, x.clone(), members[(me + 1) % n], group)
            back = dist.P2POp(dist.irecv, x, members[(me - 1) % n], group)
            for work in dist.batch_isend_irecv([onwards, back]):
                work.wait()
        if not x.eq(expected).all():
            self._check(case, f"{name} beside it gave {x.tolist()}, expected {expected}")


def run_cases(
    seed: int, first: int, cases: int, most_bytes: int, device: str, spoiled: int = -1
) -> dict[str, int]:
    return Runner(seed, most_bytes, device, spoiled).run(first, cases)


def main() -> None:
    from harness import run_ranks

    parser = argparse.ArgumentParser(description="Random all-gathers on several ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-bytes", type=int, default=MOST_BYTES, help="of output, of a case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all cases")
    options = parser.parse_args()
    began = datetime.datetime.now()
    routes = run_ranks(
        options.ranks,
        run_cases,
        options.seed,
        options.first,
        options.cases,
        options.most_bytes,
        options.device,
        backend=f"{options.device}:sdma",
        timeout=options.timeout,
    )
    seconds = (datetime.datetime.now() - began).total_seconds()
    print(f"{options.cases} cases on {options.ranks} ranks in {seconds:.0f} s, every byte right")
    for rank, calls in enumerate(routes):
        print(f"rank {rank}: {calls}")


if __name__ == "__main__":
    main()
