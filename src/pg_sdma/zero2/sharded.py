"""ZeRO-2 for any model with a list of blocks: parameters on every rank, gradients in shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from pg_sdma.zero2 import layout
from pg_sdma.zero2.reduction import reducer_for
from pg_sdma.zero2.unit import Pool, Run, ShardedUnit

# Since torch 2.13 `all_gather_into_tensor` warns that it is deprecated.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Zero2:
    """Shards the gradients of `model` over a group, one of its `blocks` after another.

    While the backward of a block runs, the gradients of the block before it are reduce-scattered
    and added to this rank's shards; only `buffers` blocks' gradients exist at a time. Every
    backward is one micro-step: gradients add up until the optimizer's step. As with DDP they are
    means over the ranks and sums over the micro-steps, and the model of the group's rank 0 counts.

    The model's parameters stay whole on every rank, in their dtype, as views of flat tensors that
    this object makes; their `.grad` is None outside of backward. What is optimized is
    `parameters()`: this rank's parts, flat, in `master_dtype` (None: in the model's dtype, with no
    copy of their own). Gradient shards are bf16, rounded stochastically with random numbers that
    depend on `seed` and on the step, micro-step and element, or fp32 (`shard_dtype`).

    Every rank constructs it with the same arguments, and in each backward every trainable parameter
    must get a gradient. Raises ValueError or TypeError for what cannot be sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        shard_dtype: torch.dtype = torch.bfloat16,
        master_dtype: torch.dtype | None = torch.float32,
        buffers: int = 2,
        seed: int = 0,
    ) -> None:
        if shard_dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"shard_dtype is {shard_dtype}: shards are bfloat16 or float32")
        if buffers < 1:
            raise ValueError(f"buffers is {buffers}: at least one block's gradients need room")
        self._group = group or c10d._get_default_group()
        self._rank, self._size = self._group.rank(), self._group.size()
        by_name = dict(model.named_parameters())
        sharded = layout.units(model, list(blocks), self._size)
        devices = {by_name[piece.name].device for unit in sharded for piece in unit.pieces}
        if len(devices) != 1:
            raise ValueError(f"trainable parameters are on {devices or 'no device'}: expected one")
        (device,) = devices
        self._run = Run(self._group, reducer_for(device), seed)
        pools = _pools(sharded, buffers, device)
        self._units = [
            ShardedUnit(self._run, unit, by_name, pools[_pool_of(unit)], shard_dtype, master_dtype)
            for unit in sharded
        ]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's part of each parameter that it has one of; each 1-D, of the master dtype.

        Their `.grad` is there from `finish` to `gather`; its dtype is that of the shards, which
        `pg_sdma.zero2.AdamW` accepts, and optimizers of torch where it is the master dtype too.
        """
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the names that the parameters have in the model."""
        for unit in self._units:
            yield from unit.parameters.items()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's allocations for gradients, buffers and shards together."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for unit in self._units
            for tensor in (unit.shard, *(buffer.flat for buffer in unit.pool.buffers))
        }
        return sum(storages.values())

    def finish(self) -> None:
        """Completes the shards and makes them the `.grad` of `parameters()`, on the current stream.

        `AdamW.step` calls it; before another optimizer's step, call it yourself. Raises
        RuntimeError where a parameter has had no gradient in one of the micro-steps.
        """
        self._refuse_incomplete()
        self._run.reducer.finish()
        for unit in self._units:
            unit.attach_gradients()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The 2-norm of the whole gradient, an fp32 scalar on the device, equal on all ranks."""
        self.finish()
        shards = [unit.shard for unit in self._units if unit.micro_step]
        if not shards:
            return torch.zeros((), device=self._units[0].shard.device)
        norms = [torch.linalg.vector_norm(shard, dtype=torch.float32) for shard in shards]
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the shards so that the norm is at most `max_norm`; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`, with no host synchronisation. Scaled bf16 shards are
        rounded to nearest.
        """
        norm = self.grad_norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        for unit in self._units:
            # Not in place: then the factor would be rounded to bf16 first.
            unit.shard.copy_(unit.shard.float() * factor)
        return norm

    @torch.no_grad()
    def gather(self) -> None:
        """Ends the step: the model gets the parameters that all ranks have updated.

        One coalesced in-place all-gather for each dtype. `AdamW.step` calls it; after another
        optimizer's step, call it yourself.
        """
        self._gather()
        self._next_step()

    def zero_grad(self) -> None:
        """Drops the gradients of the current step, also those of a backward that has failed."""
        self._run.reducer.finish()
        dropped = not all(unit.idle for unit in self._units)
        for unit in self._units:
            unit.drop_arriving()
        if dropped:
            self._next_step()

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and the place in the random numbers, to be saved on every rank.

        Frozen parameters and the model's buffers are not in it. Raises RuntimeError between the
        micro-steps of a step: gradients are not saved.
        """
        self._refuse_within_step("state_dict")
        return {
            "rank": self._rank,
            "world_size": self._size,
            "seed": self._run.seed,
            "step": self._run.step,
            "parameters": {
                name: parameter.detach().clone() for name, parameter in self.named_parameters()
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called, the model's parameters included; collective.

        Raises ValueError for the state of another rank, group size or model.
        """
        self._refuse_within_step("load_state_dict")
        found = (state["rank"], state["world_size"])
        if found != (self._rank, self._size):
            raise ValueError(
                f"{self._run.where}: the state is that of rank {found[0]} of {found[1]}; load each "
                "rank's own, in a group of the same size"
            )
        parameters = dict(self.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        found_shapes = {name: tuple(saved.shape) for name, saved in state["parameters"].items()}
        if shapes != found_shapes:
            name = next(
                name
                for name in {**shapes, **found_shapes}
                if shapes.get(name) != found_shapes.get(name)
            )
            raise ValueError(
                f"{self._run.where}: {name} has {shapes.get(name)} elements here and "
                f"{found_shapes.get(name)} in the state; load the state of the same model"
            )
        for name, parameter in parameters.items():
            parameter.copy_(state["parameters"][name])
        self._run.seed, self._run.step = state["seed"], state["step"]
        self._gather()

    def _gather(self) -> None:
        by_dtype: dict[torch.dtype, list[ShardedUnit]] = defaultdict(list)
        for unit in self._units:
            unit.write_back()
            by_dtype[unit.layout.dtype].append(unit)
        for units in by_dtype.values():
            with c10d._coalescing_manager(self._group):
                for unit in units:
                    _all_gather(unit.flat, unit.own, group=self._group)

    def _next_step(self) -> None:
        self._run.step += 1
        for unit in self._units:
            unit.next_step()

    def _refuse_incomplete(self) -> None:
        for unit in self._units:
            if unit.buffer is not None:
                raise RuntimeError(
                    f"{self._run.where}: no gradient for {', '.join(sorted(unit.missing))} in the "
                    "last backward; every trainable parameter needs one, or requires_grad=False"
                )
        most = max(unit.micro_step for unit in self._units)
        behind = [unit.layout.name for unit in self._units if unit.micro_step < most]
        if behind:
            raise RuntimeError(
                f"{self._run.where}: {', '.join(behind)} had no gradients in one of {most} "
                "micro-steps; every trainable parameter needs one in each"
            )

    def _refuse_within_step(self, operation: str) -> None:
        if not all(unit.idle for unit in self._units):
            raise RuntimeError(
                f"{self._run.where}: {operation} between the micro-steps of step {self._run.step}; "
                "call it after the optimizer's step, or drop the gradients with zero_grad"
            )


def _pool_of(unit: layout.Unit) -> tuple[torch.dtype, int | None]:
    """Blocks of one dtype share a pool, any other unit has its own."""
    return unit.dtype, None if unit.block else unit.index


def _pools(
    units: Iterable[layout.Unit], buffers: int, device: torch.device
) -> dict[tuple[torch.dtype, int | None], Pool]:
    sizes: dict[tuple[torch.dtype, int | None], list[int]] = defaultdict(list)
    for unit in units:
        sizes[_pool_of(unit)].append(unit.numel)
    return {
        key: Pool(min(buffers, len(numels)), max(numels), key[0], device)
        for key, numels in sizes.items()
    }
