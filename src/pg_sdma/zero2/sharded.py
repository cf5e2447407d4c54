"""ZeRO-2 for any model with a list of blocks: parameters on every rank, gradients in shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from pg_sdma.zero2 import checkpoint, layout
from pg_sdma.zero2.agreement import agree, host_word_device
from pg_sdma.zero2.backward import Backward
from pg_sdma.zero2.binding import Binding, binding_of, broadcast, not_sharded
from pg_sdma.zero2.reduction import reducer_for
from pg_sdma.zero2.unit import Pool, Run, ShardedUnit


class Zero2:
    """Shards the gradients of `model` over a group, one of its `blocks` after another.

    While the backward of a block runs, the gradients of the block before it are reduce-scattered
    and added to this rank's shards; `buffers` blocks' gradients exist at a time, and more only
    where gradients come in an order that needs them. Every backward is one micro-step: gradients
    add up until the optimizer's step. As with DDP they are means over the ranks and sums over the
    micro-steps, and the model of the group's rank 0 counts: its frozen parameters and buffers too.

    The model's parameters stay whole on every rank, in their dtype, as views of flat tensors that
    this object makes. After a backward their `.grad` can be set to None or to zero, by
    `model.zero_grad()` for instance, and whatever else is done with it raises. What is optimized is
    `parameters()`: this rank's parts, flat, in `master_dtype` (None: in the model's dtype, with no
    copy of their own). A model that is changed between steps (load_state_dict, averaged weights) is
    what the next step starts from.

    Gradient shards are fp32 for fp32 parameters and bf16 for bf16 ones, or `shard_dtype`; bf16 is
    rounded stochastically with random numbers that depend on `seed` and on the step, micro-step and
    element. Between the ranks gradients are summed in the parameters' dtype, or in `reduce_dtype`.

    What gets no gradient in a backward counts as zero. With `find_unused_parameters` it is known
    when the backward begins, and what got none on any rank in a whole step is left out of the
    optimizer's, as with DDP's option of that name.

    Every rank constructs it with the same arguments and makes as many backwards in a step. A model
    that is wrapped already is wrapped anew, and the earlier object is of no use any more. Raises
    ValueError or TypeError for what cannot be sharded, and RuntimeError on the other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        shard_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        buffers: int = 2,
        find_unused_parameters: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.group = group or c10d._get_default_group()
        options = (shard_dtype, master_dtype, reduce_dtype, buffers, find_unused_parameters, seed)
        sharded: list[layout.Unit] = []
        error: Exception | None = None
        try:
            _check(shard_dtype, reduce_dtype, buffers)
            sharded = layout.units(model, list(blocks), self.group.size())
            by_name = dict(model.named_parameters())
            devices = {by_name[piece.name].device for unit in sharded for piece in unit.pieces}
            if len(devices) != 1:
                raise ValueError(
                    f"trainable parameters are on {devices or 'no device'}: expected one"
                )
        except (TypeError, ValueError) as refusal:
            error = refusal
        others = ((name, t.dtype, t.shape) for name, t in not_sharded(model))
        agree(self.group, "wrapping the model", error, (options, *sharded, *others))
        for earlier in binding_of(model):
            earlier.release()
        (self.device,) = devices
        self._run = Run(self.group, reducer_for(self.device), seed)
        self._find_unused = find_unused_parameters
        self._skipped: set[str] = set()
        pools = _pools(sharded, buffers, reduce_dtype, self.device)
        self._units = [
            ShardedUnit(
                self._run,
                unit,
                by_name,
                pools[_pool_of(unit)],
                # Its buffer is its own, and adds up without loss.
                once_a_step=not unit.block and (reduce_dtype or unit.dtype) == torch.float32,
                shard_dtype=shard_dtype or unit.dtype,
                master_dtype=master_dtype,
                reduce_dtype=reduce_dtype or unit.dtype,
            )
            for unit in sharded
        ]
        self._backward = Backward(self._run, self._units, find_unused_parameters)
        self._binding = Binding(self._run, model, self._units, self._backward.remove)
        broadcast((tensor for _, tensor in not_sharded(model)), self.group)
        self.names = [piece.name for unit in sharded for piece in unit.pieces]

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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's parameters, by name."""
        return {
            piece.name: tuple(piece.shape) for unit in self._units for piece in unit.layout.pieces
        }

    @property
    def where(self) -> str:
        """What messages begin with."""
        return self._run.where

    @property
    def complete(self) -> bool:
        """The gradients that have come are in the shards: `finish` was called after them."""
        return self._backward.complete

    def names_of(self, parameters: Iterable[Tensor]) -> list[str]:
        """The names of parameters of the model or of this object; frozen ones are left out.

        Raises ValueError for any other tensor.
        """
        names = {id(p): "" for p in self.model.parameters()}
        for unit in self._units:
            for of in (unit.model, unit.parameters):
                names |= {id(parameter): name for name, parameter in of.items()}
        found = []
        for parameter in parameters:
            if id(parameter) not in names:
                raise ValueError(
                    f"{self.where}: a parameter of shape {tuple(parameter.shape)} is none of the "
                    "model's (was it replaced after it was listed?); give parameters of the model, "
                    "or of the Zero2"
                )
            found.append(names[id(parameter)])
        return [name for name in dict.fromkeys(found) if name]

    def finish(self) -> None:
        """Completes the shards and makes them the `.grad` of `parameters()`, on the current stream,
        and takes changes of the model into `parameters()`.

        `AdamW.step` calls it, and `attach` has another optimizer's step do so. Raises RuntimeError
        where the last backward did not end, or where a gradient was put where none is looked for.
        """
        self._complete()
        for unit in self._units:
            unit.refresh()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The 2-norm of the whole gradient, an fp32 scalar on the device, equal on all ranks."""
        self._complete()
        norms = [torch.zeros((), device=self.device)]
        norms += [
            torch.linalg.vector_norm(unit.shard, dtype=torch.float32)
            for unit in self._units
            if unit.filled
        ]
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self.group)
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
    def gather(self, names: Collection[str] | None = None) -> None:
        """Ends the step: the model gets the parameters that all ranks have updated, and the
        gradients of the parameters with these names (all, by default) are forgotten.

        One coalesced in-place all-gather for each dtype. `AdamW.step` calls it, and `attach` has
        another optimizer's step do so.
        """
        self._refuse_removed()
        self._gather()
        self._next_step(self.names if names is None else names)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes each step of an optimizer over `parameters()` call `finish` before and `gather`
        after."""
        optimizer.register_step_pre_hook(lambda *_: self.finish())
        optimizer.register_step_post_hook(lambda *_: self.gather())

    def zero_grad(self, names: Collection[str] | None = None) -> None:
        """Drops the gradients of the parameters with these names (all, by default).

        Those of a backward that has failed are dropped in any case.
        """
        self._refuse_removed()
        if names is None or self._backward.failed:
            dropped = not all(unit.idle for unit in self._units)
            self._backward.reset()
            names = self.names
        else:
            self._complete()
            dropped = any(unit.filled.intersection(names) for unit in self._units)
        if dropped:
            self._next_step(names)

    def remove(self) -> None:
        """Leaves the model to itself, with the values that it has: it may be wrapped anew."""
        if self._binding.bound:
            self._binding.release()

    def state_dict(self) -> dict[str, Any]:
        """The trained parameters as the optimizer has them, and the place in the random numbers;
        collective.

        Parameters are DTensors of the model's shapes, in the dtype of `parameters()`, so that
        torch.distributed.checkpoint saves and loads them on any number of ranks;
        `state["parameters"][name].full_tensor()` is a whole one, on every rank. Frozen parameters
        and the model's buffers are not in it. Raises RuntimeError between the micro-steps of a
        step: gradients are not saved.
        """
        self.refuse_within_step("state_dict")
        self._binding.adopt()
        for unit in self._units:
            unit.refresh()
        return {
            "seed": self._run.seed,
            "step": self._run.step,
            "parameters": self.as_dtensors(self.names, lambda parameter: parameter),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called, the model's parameters included; collective.

        Raises ValueError for the state of another model, and RuntimeError on the other ranks.
        """
        self.refuse_within_step("load_state_dict")
        error = self.mismatch(self.shapes, state["parameters"])
        self.agree("loading a state", error, (state["seed"], state["step"]))
        self._binding.adopt()
        self.take_values(state["parameters"], lambda parameter: parameter)
        self._run.seed, self._run.step = state["seed"], state["step"]
        self._gather()

    # What checkpoints of an optimizer are made with, too.

    def refuse_within_step(self, operation: str) -> None:
        """Raises RuntimeError where gradients wait for a step."""
        self._refuse_removed()
        if not all(unit.idle for unit in self._units):
            raise RuntimeError(
                f"{self._run.where}: {operation} between the micro-steps of step {self._run.step}; "
                "call it after the optimizer's step, or drop the gradients with zero_grad"
            )

    def as_dtensors(self, names: Collection[str], values: checkpoint.Values) -> dict[str, DTensor]:
        """See `checkpoint.as_dtensors`."""
        mesh = checkpoint.mesh_of(self.group, self.device)
        made: dict[str, DTensor] = {}
        for unit in self._units:
            if not unit.model.keys().isdisjoint(names):
                made |= checkpoint.as_dtensors(unit, mesh, names, values)
        return made

    def take_values(self, saved: Mapping[str, Tensor], values: checkpoint.Values) -> None:
        """See `checkpoint.take_values`."""
        for unit in self._units:
            checkpoint.take_values(unit, saved, values)

    def mismatch(self, shapes: Mapping[str, Any], saved: Mapping[str, Tensor]) -> ValueError | None:
        """See `checkpoint.mismatch`."""
        return checkpoint.mismatch(shapes, saved, self.where)

    def agree(self, operation: str, error: Exception | None, facts: tuple[Any, ...] = ()) -> None:
        """See `agreement.agree`."""
        agree(self.group, operation, error, facts)

    def _complete(self) -> None:
        self._refuse_removed()
        self._binding.adopt()
        already = self._backward.complete
        self._backward.finish()
        if self._find_unused and not already:
            self._skipped = self._unused()
        for unit in self._units:
            unit.attach_gradients(self._skipped)

    def _unused(self) -> set[str]:
        """Parameters that got no gradient on any rank since the last step."""
        used = {name for unit in self._units for name in unit.used}
        flags = torch.tensor(
            [name in used for name in self.names],
            dtype=torch.int32,
            device=host_word_device(self.group),
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        if len(used) == len(self.names):
            return set()  # without a look, for which the host would wait
        return {n for n, flag in zip(self.names, flags.tolist(), strict=True) if not flag}

    def _gather(self) -> None:
        by_dtype: dict[torch.dtype, list[ShardedUnit]] = defaultdict(list)
        for unit in self._units:
            unit.write_back()
            by_dtype[unit.layout.dtype].append(unit)
        for units in by_dtype.values():
            with c10d._coalescing_manager(self.group):
                for unit in units:
                    checkpoint.all_gather(unit.flat, unit.own, group=self.group)

    def _next_step(self, names: Collection[str]) -> None:
        for unit in self._units:
            unit.drop(names)
        self._run.step += 1
        self._backward.next_step()

    def _refuse_removed(self) -> None:
        if not self._binding.bound:
            raise RuntimeError(
                f"{self.where}: this Zero2 was removed from its model, or the model was wrapped "
                "anew; use the new one, with an optimizer of its own"
            )


def _check(shard_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, buffers: int) -> None:
    for name, dtype in (("shard_dtype", shard_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype not in (None, torch.bfloat16, torch.float32):
            raise TypeError(f"{name} is {dtype}: expected bfloat16 or float32")
    if buffers < 1:
        raise ValueError(f"buffers is {buffers}: at least one block's gradients need room")


def _pool_of(unit: layout.Unit) -> tuple[torch.dtype, int | None]:
    """Blocks of one dtype share a pool, any other unit has its own."""
    return unit.dtype, None if unit.block else unit.index


def _pools(
    units: Iterable[layout.Unit],
    buffers: int,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
) -> dict[tuple[torch.dtype, int | None], Pool]:
    sizes: dict[tuple[torch.dtype, int | None], list[int]] = defaultdict(list)
    for unit in units:
        sizes[_pool_of(unit)].append(unit.numel)
    return {
        key: Pool(min(buffers, len(numels)), max(numels), reduce_dtype or key[0], device)
        for key, numels in sizes.items()
    }
