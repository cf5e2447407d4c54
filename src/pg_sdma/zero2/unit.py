"""One unit at run time: where its gradients arrive, and which part of it this rank owns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pg_sdma.zero2 import layout
from pg_sdma.zero2.placeholder import ShardedGradient
from pg_sdma.zero2.reduction import Buffer, Reducer, Reduction
from pg_sdma.zero2.rounding import Key


@dataclass
class Run:
    """What all units of a model share."""

    group: dist.ProcessGroup
    reducer: Reducer
    seed: int
    step: int = 0

    @property
    def where(self) -> str:
        return f"rank {self.group.rank()} of {self.group.size()}, ZeRO-2"


class Pool:
    """Buffers that units take in turn; more than `count` only where more are held at a time."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._make = lambda: Buffer(numel, dtype, device)
        self.buffers = [self._make() for _ in range(count)]

    def take(self, holder: object) -> Buffer:
        """The buffer that has been free for the longest time."""
        for index, buffer in enumerate(self.buffers):
            if buffer.holder is None:
                del self.buffers[index]
                break
        else:
            buffer = self._make()
        self.buffers.append(buffer)
        buffer.holder = holder
        return buffer


class ShardedUnit:
    """What this rank has of a unit: its parameters' flat tensor and the shards.

    `once_a_step` units keep their buffer, and are reduced from it once for all micro-steps.
    """

    def __init__(
        self,
        run: Run,
        unit: layout.Unit,
        model: dict[str, nn.Parameter],
        pool: Pool,
        *,
        once_a_step: bool,
        shard_dtype: torch.dtype,
        master_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.layout = unit
        self.pool = pool
        self.once_a_step = once_a_step
        self.model = {piece.name: model[piece.name] for piece in unit.pieces}
        self.buffer: Buffer | None = None  # while gradients arrive
        # Of the current backward:
        self.missing: set[str] = set()
        self.arrived: set[str] = set()
        self.launched = False
        # Of the current step:
        self.used: set[str] = set()  # parameters that had a gradient on this rank
        self.filled: set[str] = set()  # parameters whose gradients the shards hold, or will hold
        self._empty = True  # nothing in the shard counts
        self._run = run
        self._views: dict[Buffer, dict[str, Tensor]] = {}

        device = next(iter(self.model.values())).device
        self.flat = torch.zeros(unit.numel, dtype=unit.dtype, device=device)
        self._placeholders: dict[str, ShardedGradient] = {}
        self._homes = {piece.name: piece.view(self.flat) for piece in unit.pieces}
        for name, home in self._homes.items():
            parameter = self.model[name]
            home.copy_(parameter.detach())
            parameter.data = home
            parameter.grad = None
            if parameter.grad_dtype != reduce_dtype:
                parameter.grad_dtype = reduce_dtype
            self._placeholders[name] = ShardedGradient.of(
                parameter, reduce_dtype, f"{run.where}: the gradient of {name}"
            )
        dist.broadcast(self.flat, group=run.group, group_src=0)

        self.rank = rank = run.group.rank()
        self.own = self.flat[rank * unit.shard_numel :][: unit.shard_numel]
        self.shard = torch.zeros(unit.shard_numel, dtype=shard_dtype, device=device)
        # Without a dtype of its own, a view: then the optimizer updates the model itself.
        self._master = self.own.to(master_dtype or unit.dtype)
        self._master_version = self._master._version
        self.parameters: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, Tensor] = {}
        self.places: dict[str, slice] = {}  # of `parameters` within the shard
        for piece, start, stop in unit.owned(rank):
            parameter = nn.Parameter(self._master[start:stop])
            parameter.grad_dtype = shard_dtype
            self.parameters[piece.name] = parameter
            self._gradients[piece.name] = self.shard[start:stop]
            self.places[piece.name] = slice(start, stop)

    @property
    def idle(self) -> bool:
        """Between steps: no gradient has come."""
        return not self.filled and self.buffer is None and not self.arrived

    # Parameters

    @property
    def master_dtype(self) -> torch.dtype:
        return self._master.dtype

    def adopt(self) -> None:
        """Where a parameter has been given other memory, takes its values back into the unit's.

        Raises RuntimeError where it has another dtype, device or shape.
        """
        for name, parameter in self.model.items():
            home = self._homes[name]
            if parameter.data_ptr() == home.data_ptr() and parameter.dtype == home.dtype:
                continue
            self.accept(name, parameter)
            parameter.data = home

    def accept(self, name: str, values: Tensor) -> None:
        """Makes `values` those of the parameter."""
        home = self._homes[name]
        if (values.shape, values.dtype, values.device) != (home.shape, home.dtype, home.device):
            raise RuntimeError(
                f"{self._run.where}: {name} has become {values.dtype} {tuple(values.shape)} on "
                f"{values.device} after it was wrapped as {home.dtype} {tuple(home.shape)} on "
                f"{home.device}; move and cast a model first, and wrap it then"
            )
        home.copy_(values.detach())

    def refresh(self) -> None:
        """Masters follow the model where somebody else has changed it since the last step.

        Element by element, so that whatever was not changed keeps the digits that the model's dtype
        has no room for. Enqueued: the host does not look at what has changed.
        """
        if self._master.dtype == self.own.dtype or self._master._version != self._master_version:
            return  # one tensor; or the optimizer has its new values there already
        same = self._master.to(self.own.dtype) == self.own
        if self.own.device.type != "cpu" or not same.all():
            self._master.copy_(torch.where(same, self._master, self.own))
        self._master_version = self._master._version

    def write_back(self) -> None:
        """Brings the optimized values into this rank's part of the flat tensor."""
        if self._master.dtype != self.own.dtype:
            self.own.copy_(self._master)
        self._master_version = self._master._version

    # Gradients

    def receive(self, name: str) -> None:
        """Before autograd adds the parameter's gradient to its `.grad`."""
        buffer = self._take()
        parameter = self.model[name]
        view = self._views[buffer][name]
        if parameter.grad is not view:
            if parameter.grad is not None and parameter.grad is not self._placeholders[name]:
                self._refuse_foreign(name)
            parameter.grad = view
        self._run.reducer.arriving(buffer)

    def received(self, name: str) -> None:
        assert self.buffer is not None
        if self.model[name].grad is not self._views[self.buffer][name]:
            raise RuntimeError(
                f"{self._run.where}: autograd has replaced the gradient of {name} instead of "
                "adding to it; create_graph=True and gradients of gradients are not supported: "
                "call zero_grad() to go on"
            )
        self.missing.discard(name)
        self.arrived.add(name)
        self.used.add(name)

    def launch(self, micro_step: int) -> None:
        """Has the buffer reduced, which is all zeros where no gradient came, and lets go of it."""
        if self.buffer is None:
            self._run.reducer.arriving(self._take())
        assert self.buffer is not None
        reduction = Reduction(
            self.buffer.flat[: self.layout.numel],
            self.shard,
            overwrite=self._empty,
            key=Key(self._run.seed, self._run.step, micro_step, self.layout.index),
            group=self._run.group,
        )
        self._run.reducer.launch(self.buffer, reduction)
        self._empty = False
        self.buffer.holder = None
        self.buffer = None

    def put_away(self) -> None:
        """After a backward, or a launch in it: there is a gradient, though not in `.grad`."""
        for name, parameter in self.model.items():
            placeholder = self._placeholders[name]
            placeholder.dropped = False
            parameter.grad = placeholder
        self.filled |= self.model.keys()

    def attach_gradients(self, skipped: Collection[str]) -> None:
        """Makes the shard the `.grad` of this rank's parameters, where it holds a gradient."""
        for name, parameter in self.parameters.items():
            there = name in self.filled and name not in skipped and self.model[name].requires_grad
            parameter.grad = self._gradients[name] if there else None

    def dropped(self) -> set[str]:
        """The parameters whose gradients the user has dropped since they were put away.

        Raises RuntimeError for a gradient that the user has put there instead.
        """
        dropped = set()
        for name, parameter in self.model.items():
            placeholder = self._placeholders[name]
            if parameter.grad is None or (parameter.grad is placeholder and placeholder.dropped):
                dropped.add(name)
            elif parameter.grad is not placeholder:
                self._refuse_foreign(name)
        return dropped & self.filled

    @torch.no_grad()
    def drop(self, names: Collection[str]) -> None:
        """Forgets these gradients, of which nothing is being reduced."""
        for name in self.filled.intersection(names):
            self.model[name].grad = None
            if self.buffer is not None:
                self._run.reducer.arriving(self.buffer)
                self._views[self.buffer][name].zero_()
            if name in self._gradients and not self._empty:
                self._gradients[name].zero_()
        for name in names:
            if name in self.parameters:
                self.parameters[name].grad = None
        self.filled.difference_update(names)
        self.used.difference_update(names)
        self._empty = self._empty or not self.filled

    def reset(self) -> None:
        """Forgets everything, what a failed backward has left in the buffer too."""
        if self.buffer is not None:
            self._run.reducer.arriving(self.buffer)
            self.buffer.flat.zero_()
            self.buffer.holder = None
            self.buffer = None
        for parameter in (*self.model.values(), *self.parameters.values()):
            parameter.grad = None
        self.missing, self.arrived, self.used, self.filled = set(), set(), set(), set()
        self.launched = False
        self._empty = True

    def let_go(self) -> None:
        """The parameters are as they were before: with gradients of their own dtype."""
        for parameter in self.model.values():
            if parameter.grad_dtype != parameter.dtype:
                parameter.grad_dtype = parameter.dtype

    def _take(self) -> Buffer:
        if self.buffer is None:
            self.buffer = self.pool.take(self)
            if self.buffer not in self._views:
                self._views[self.buffer] = {
                    piece.name: piece.view(self.buffer.flat) for piece in self.layout.pieces
                }
        return self.buffer

    def _refuse_foreign(self, name: str) -> None:
        raise RuntimeError(
            f"{self._run.where}: {name} has a .grad from elsewhere, which no step would use; set "
            "it to None"
        )
