"""Random reduce-scatters, checked bit for bit against a plain reference that every rank computes.

    python tests/group/random_reductions.py --ranks 3 --cases 5000 --seed 7

A case is one reduce-scatter: any form, dtype, reduction, size, number of tensors, alignment, group,
in place or not, synchronous or not, issued from one of two threads, with all-gathers and operations
of the inner around it and earlier cases still pending. All of it is drawn from (seed, number), as
in random_gathers.py, whose runner this is.

The reference adds the ranks' slices in rank order, in fp32 (fp64 for fp64), scales the sum in that
precision, and rounds once. Outputs are poisoned with the complement of what has to arrive and lie
between guard bytes. Inputs are overwritten as soon as their case is complete, half of the time.
Small sums are made by a group of the inner backend too, and may not be further from the exact sum.

With `--device cuda` the tensors are on GPUs and the reference is still computed on the CPU. Where
the inner is gloo, which has no reduce-scatters of CUDA tensors on every torch, it is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from random_gathers import (
    BESIDE,
    FORMS,
    GUARD,
    GUARD_BYTE,
    MOST_BYTES,
    Case,
    Functional,
    Runner,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCTIONS = ("SUM", "AVG", "PREMUL_SUM", "PREMUL_SUM by tensor")
ALSO_BESIDE = ("all_gather", "all_gather async", "MAX", "integers")
INNER_SUMS = ("MAX", "integers")
# Messages and barriers beside it are left to tests/gpu/test_gathers.py.
BESIDE_ON_GPU = ("all_reduce", "all_reduce async", "broadcast", *ALSO_BESIDE)

PERIOD = 1_000_003  # numbers that are drawn; what is longer repeats them, at no size of a piece


@dataclass(frozen=True)
class Reduction(Case):
    """One reduce-scatter, as all ranks know it. `counts` are the elements of one slice."""

    reduction: str = "SUM"
    factor: float = 1.0

    def __str__(self) -> str:
        return super().__str__().replace("all-gather", f"{self.reduction} reduce-scatter")

    @property
    def op(self) -> Any:
        if self.reduction == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(self.factor)
        if self.reduction == "PREMUL_SUM by tensor":
            return dist._make_nccl_premul_sum(torch.tensor([self.factor], dtype=self.dtype))
        return getattr(dist.ReduceOp, self.reduction)


def draw(seed: int, number: int, sizes: list[int], most_bytes: int) -> Reduction:
    """Case `number` for groups of `sizes` ranks, of at most `most_bytes` of input."""
    dice = random.Random(f"{seed} {number} reduction")
    group = dice.choice([0, 0, *range(len(sizes))])
    form = dice.choice(FORMS)
    dtype = dice.choice(DTYPES)
    tensors = 1
    if form == "coalesced":
        tensors = dice.randint(65, 140) if dice.random() < 0.05 else dice.randint(1, 40)
    total = 0 if dice.random() < 0.03 else int(math.exp(dice.uniform(0, math.log(most_bytes))))
    weights = [dice.random() for _ in range(tensors)]
    return Reduction(
        number=number,
        group=group,
        form=form,
        dtype=dtype,
        counts=tuple(
            int(total * weight / sum(weights)) // (sizes[group] * dtype.itemsize)
            for weight in weights
        ),
        shifts=tuple(dice.choice([0, 0, 1, 3]) for _ in weights),
        in_place=dice.random() < 0.5,
        asynchronous=dice.random() < 0.5,
        pending=dice.choice([0, 0, 1, 2, 6]),
        out_of_turn=dice.random() < 0.3,
        thread=int(dice.random() < 0.25),
        overwrite=dice.random() < 0.5,
        beside=tuple(dice.sample((*BESIDE, *ALSO_BESIDE), dice.choice([0, 0, 1, 2]))),
        reduction=dice.choice(REDUCTIONS[:2] if form == "functional" else REDUCTIONS),
        # Few bits, so that every dtype has it.
        factor=dice.choice([0.5, 3.0, -1.25, 0.3359375]),
    )


class Numbers:
    """What the ranks add up: random numbers of many magnitudes, some not finite."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = PERIOD
        scale = torch.exp2(torch.randint(-12, 13, (size,), generator=generator).double())
        self.numbers = torch.randn(size, generator=generator, dtype=torch.float64) * scale
        special = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, -65504.0, 6e-8]
        at = torch.randint(0, size, (size // 500,), generator=generator)
        which = torch.randint(0, len(special), at.shape, generator=generator)
        self.numbers[at] = torch.tensor(special, dtype=torch.float64)[which]

    def take(self, case: int, tensor: int, rank: int, first: int, count: int) -> torch.Tensor:
        """Numbers [first, first + count) of the input of `rank` to a tensor of a case."""
        start = (random.Random(f"{case} {tensor} {rank}").randrange(PERIOD) + first) % PERIOD
        parts = []
        while count > 0:
            parts.append(self.numbers[start : start + count])
            count -= len(parts[-1])
            start = 0
        return torch.cat(parts) if parts else self.numbers[:0]


def reference(slices: list[torch.Tensor], case: Reduction) -> torch.Tensor:
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    total = slices[0].to(wide)
    for part in slices[1:]:
        total = total + part.to(wide)
    if case.reduction == "AVG":
        total = total / len(slices)
    elif case.reduction != "SUM":
        total = total * case.factor
    return total.to(case.dtype)


class Scatter:
    """One case on this rank: its tensors, and its Work while it is pending."""

    def __init__(
        self, case: Reduction, numbers: Numbers, ranks: int, rank: int, device: torch.device
    ) -> None:
        self.case = case
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self.work: Any = None
        self.guards: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self.slices: list[list[torch.Tensor]] = []  # what is summed here, by tensor, by rank
        for index, count in enumerate(case.counts):
            shift = case.shifts[index]
            whole = self._place(ranks * count, shift)
            whole.copy_(numbers.take(case.number, index, rank, 0, ranks * count))
            self.slices.append(
                [
                    numbers.take(case.number, index, r, rank * count, count).to(case.dtype)
                    for r in range(ranks)
                ]
            )
            right = reference(self.slices[-1], case).to(device)
            if case.in_place:
                output = whole[rank * count : (rank + 1) * count]
            else:
                output = self._place(count, shift)
                torch.bitwise_not(right.view(torch.uint8), out=output.view(torch.uint8))
            self.inputs.append(whole)
            self.outputs.append(output)
            self.expected.append(right)

    def _place(self, count: int, shift: int) -> torch.Tensor:
        """`count` elements between guards, `shift` elements off the allocation's alignment."""
        front = GUARD + shift * self.case.dtype.itemsize
        size = count * self.case.dtype.itemsize
        buffer = torch.empty(front + size + GUARD, dtype=torch.uint8, device=self.device)
        for guard in (buffer[:front], buffer[front + size :]):
            self.guards.append(guard.fill_(GUARD_BYTE))
        return buffer[front : front + size].view(self.case.dtype)

    @property
    def bytes(self) -> int:
        return sum(whole.nbytes for whole in self.inputs)

    def issue(self, group: dist.ProcessGroup) -> None:
        case = self.case
        if case.form == "list":
            inputs = list(self.inputs[0].split(case.counts[0])) if case.counts[0] else []
            inputs = inputs or [self.inputs[0]] * self.ranks
            self.work = dist.reduce_scatter(
                self.outputs[0], inputs, case.op, group, async_op=case.asynchronous
            )
        elif case.form == "single":
            self.work = dist.reduce_scatter_tensor(
                self.outputs[0], self.inputs[0], case.op, group, async_op=case.asynchronous
            )
        elif case.form == "functional":
            operation = torch.ops._c10d_functional.reduce_scatter_tensor_out
            self.work = Functional(
                operation(
                    self.inputs[0],
                    case.reduction.lower(),
                    group.size(),
                    group.group_name,
                    out=self.outputs[0],
                )
            )
        else:
            with dist._coalescing_manager(group, async_ops=case.asynchronous) as self.work:
                for whole, output in zip(self.inputs, self.outputs, strict=True):
                    dist.reduce_scatter_tensor(output, whole, case.op, group)
            if not case.asynchronous:
                self.work = None

    def finish(self) -> str:
        """Completes the case. Returns what is wrong with it; empty when nothing is."""
        if self.work is not None:
            self.work.wait()
        for index, (output, right) in enumerate(zip(self.outputs, self.expected, strict=True)):
            if self.case.overwrite:
                output = output.clone() if self.case.in_place else output
                self.inputs[index].view(torch.uint8).fill_(0x5A)
            if wrong := difference(output, right):
                return f"tensor {index}: {wrong}"
        if any(not guard.eq(GUARD_BYTE).all() for guard in self.guards):
            return "bytes outside of the outputs were written"
        return ""


def difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """How two tensors differ in bits; which NaN is which does not count."""
    shape = (-1, got.dtype.itemsize)
    got_bits, right_bits = (t.view(torch.uint8).view(shape) for t in (got, expected))
    same = (got_bits == right_bits).all(1) | (got.isnan() & expected.isnan())
    if same.all():
        return ""
    wrong = (~same).nonzero().flatten()
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(got)} numbers are wrong, the first at {at}: "
        f"got {got[at].item()!r}, expected {expected[at].item()!r}"
    )


class ReductionRunner(Runner):
    """Runs cases on this rank; the environment has both operations in PG_SDMA_OPS."""

    program = "random_reductions.py"
    draw = staticmethod(draw)

    def __init__(self, seed: int, most_bytes: int, spoiled: int = -1, device: str = "cpu") -> None:
        super().__init__(seed, 0, device, spoiled)
        self.most_bytes = most_bytes
        backend = dist.group.WORLD._get_backend(self.device)
        self.inner_sums = device == "cpu" or backend.inner(device).name() != "gloo"
        self.numbers = Numbers(seed)

    def _gather(self, case: Reduction) -> Scatter:
        members = self.members[case.group]
        return Scatter(case, self.numbers, len(members), members.index(self.rank), self.device)

    def _compare(self, case: Case) -> None:
        """How far from the exact sum ours and the inner's are."""
        assert isinstance(case, Reduction)
        if not self.inner_sums:
            return
        summed = self._gather(dataclasses.replace(case, reduction="SUM", overwrite=False))
        for whole, output, right, slices in zip(
            summed.inputs, summed.outputs, summed.expected, summed.slices, strict=True
        ):
            if len(right) == 0:
                continue
            dist.reduce_scatter_tensor(output, whole, group=self.inners[case.group])
            wide = torch.stack([part.double() for part in slices])
            exact, magnitude = wide.sum(0), wide.abs().sum(0)
            right, output = right.cpu(), output.cpu()
            ours, theirs = ((t.double() - exact).abs() for t in (right, output))
            finite = right.isfinite() & output.isfinite() & magnitude.isfinite()
            # Rounding once is as near as can be, but for what adding up in fp32 (fp64) takes.
            step = 2.0**-53 if case.dtype == torch.float64 else 2.0**-24
            slack = len(slices) * step * magnitude
            further = finite & (ours > theirs + slack)
            if further.any():
                at = int(further.nonzero()[0])
                self._check(case, f"further from {exact[at]} than the inner: {right[at]}")

    def _beside(self, case: Case, name: str) -> None:
        if self.device.type == "cuda" and name not in BESIDE_ON_GPU:
            return
        if name in INNER_SUMS and not self.inner_sums:
            return
        if name not in ALSO_BESIDE:
            super()._beside(case, name)
            return
        group, members = self.groups[case.group], self.members[case.group]
        n, me = len(members), members.index(self.rank)
        mine = torch.arange(n, device=self.device) + case.number + me
        output = torch.empty(1, dtype=torch.int64, device=self.device)
        if name == "MAX":
            expected = mine[me : me + 1] + (n - 1 - me)
            dist.reduce_scatter_tensor(output, mine, dist.ReduceOp.MAX, group)
        elif name == "integers":
            expected = n * (mine[me : me + 1] - me) + n * (n - 1) // 2
            dist.reduce_scatter_tensor(output, mine, group=group)
        else:
            output = torch.empty(n, dtype=torch.int64, device=self.device)
            expected = torch.arange(n, device=self.device) * 2 + case.number
            work = dist.all_gather_into_tensor(
                output, mine[me : me + 1].clone(), group, async_op=name.endswith("async")
            )
            if work is not None:
                work.wait()
        if not output.equal(expected):
            self._check(case, f"{name} beside it gave {output}, expected {expected}")


def run_cases(
    seed: int, first: int, cases: int, most_bytes: int, spoiled: int = -1, device: str = "cpu"
) -> dict[str, int]:
    return ReductionRunner(seed, most_bytes, spoiled, device).run(first, cases)


def main() -> None:
    from harness import run_ranks

    parser = argparse.ArgumentParser(description="Random reduce-scatters on several ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-bytes", type=int, default=MOST_BYTES, help="of input, of a case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all cases")
    options = parser.parse_args()
    args = (options.seed, options.first, options.cases, options.most_bytes, -1, options.device)
    env = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}
    if options.device == "cuda":  # a late call has the inner's bits
        env |= {"PG_SDMA_PATIENCE_MS": "20000", "PG_SDMA_MIN_BYTES": "0"}
    routes = run_ranks(
        options.ranks,
        run_cases,
        *args,
        backend=f"{options.device}:sdma",
        env=env,
        timeout=options.timeout,
    )
    print(f"{options.cases} cases on {options.ranks} ranks, every bit right")
    for rank, calls in enumerate(routes):
        print(f"rank {rank}: {calls}")


if __name__ == "__main__":
    main()
