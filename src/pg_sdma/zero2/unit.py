"""One unit at run time: where its gradients arrive, and which part of it this rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pg_sdma.zero2 import layout
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
    """Buffers that units take in turn."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = [Buffer(numel, dtype, device) for _ in range(count)]
        self._taken = 0

    def next(self) -> Buffer:
        self._taken += 1
        return self.buffers[self._taken % len(self.buffers)]


class ShardedUnit:
    """What this rank has of a unit: its parameters' flat tensor and the shards."""

    def __init__(
        self,
        run: Run,
        unit: layout.Unit,
        model: dict[str, nn.Parameter],
        pool: Pool,
        shard_dtype: torch.dtype,
        master_dtype: torch.dtype | None,
    ) -> None:
        self.layout = unit
        self.pool = pool
        self.buffer: Buffer | None = None  # while gradients arrive
        self.missing: set[str] = set()
        self.micro_step = 0  # of the current step
        self._run = run
        self._model = {piece.name: model[piece.name] for piece in unit.pieces}
        self._views: dict[Buffer, dict[str, Tensor]] = {}

        device = next(iter(self._model.values())).device
        self.flat = torch.zeros(unit.numel, dtype=unit.dtype, device=device)
        for name, view in self._views_of(self.flat).items():
            view.copy_(self._model[name].detach())
            self._model[name].data = view
            self._model[name].grad = None
            self._hook(name)
        dist.broadcast(self.flat, group=run.group, group_src=0)

        rank = run.group.rank()
        self.own = self.flat[rank * unit.shard_numel :][: unit.shard_numel]
        self.shard = torch.zeros(unit.shard_numel, dtype=shard_dtype, device=device)
        # Without a dtype of its own, a view: then the optimizer updates the model itself.
        self._master = self.own.to(master_dtype or unit.dtype)
        self.parameters: dict[str, nn.Parameter] = {}
        self._gradients: dict[str, Tensor] = {}
        for piece, start, stop in unit.owned(rank):
            parameter = nn.Parameter(self._master[start:stop])
            parameter.grad_dtype = shard_dtype
            self.parameters[piece.name] = parameter
            self._gradients[piece.name] = self.shard[start:stop]

    @property
    def idle(self) -> bool:
        """Between steps: no gradient has come."""
        return self.micro_step == 0 and self.buffer is None

    def attach_gradients(self) -> None:
        """Makes the shard the `.grad` of this rank's parameters, where it holds a gradient."""
        for name, parameter in self.parameters.items():
            parameter.grad = self._gradients[name] if self.micro_step else None

    def next_step(self) -> None:
        self.micro_step = 0
        for parameter in self.parameters.values():
            parameter.grad = None

    def write_back(self) -> None:
        """Brings the optimized values into this rank's part of the flat tensor."""
        if self._master is not self.own:
            self.own.copy_(self._master)

    def drop_arriving(self) -> None:
        """Empties the buffer that a failed backward has left half filled."""
        if self.buffer is not None:
            self._run.reducer.arriving(self.buffer)
            self.buffer.flat.zero_()
            self._release()

    def _hook(self, name: str) -> None:
        parameter = self._model[name]
        parameter.register_hook(lambda gradient: self._before(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter: self._after(name))

    def _before(self, name: str) -> None:
        """Before autograd adds the parameter's gradient to its `.grad`."""
        if self.buffer is None:
            self._take()
        assert self.buffer is not None
        if name not in self.missing:
            raise RuntimeError(
                f"{self._run.where}: a second gradient for {name} before the rest of "
                f"{self.layout.name} had its first; one backward is one micro-step"
            )
        self._run.reducer.arriving(self.buffer)

    def _after(self, name: str) -> None:
        assert self.buffer is not None
        if self._model[name].grad is not self._views[self.buffer][name]:
            raise RuntimeError(
                f"{self._run.where}: autograd has replaced the gradient of {name} instead of "
                "adding to it; create_graph=True and gradients of gradients are not supported"
            )
        self.missing.discard(name)
        if not self.missing:
            self._launch()
            self._release()
            self.micro_step += 1

    def _launch(self) -> None:
        assert self.buffer is not None
        reduction = Reduction(
            self.buffer.flat[: self.layout.numel],
            self.shard,
            overwrite=self.micro_step == 0,
            key=Key(self._run.seed, self._run.step, self.micro_step, self.layout.index),
            group=self._run.group,
        )
        self._run.reducer.launch(self.buffer, reduction)

    def _take(self) -> None:
        for name, parameter in self._model.items():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{self._run.where}: {name} has a .grad from elsewhere; set it to None"
                )
        buffer = self.pool.next()
        if buffer.holder is not None:
            assert isinstance(buffer.holder, ShardedUnit)
            raise RuntimeError(
                f"{self._run.where}: {self.layout.name} has gradients while "
                f"{', '.join(sorted(buffer.holder.missing))} still has none; freeze what gets no "
                "gradient, or raise `buffers` where more blocks are in backward at a time"
            )
        if buffer not in self._views:
            self._views[buffer] = self._views_of(buffer.flat)
        for name, view in self._views[buffer].items():
            self._model[name].grad = view
        buffer.holder = self
        self.buffer, self.missing = buffer, set(self._model)

    def _release(self) -> None:
        assert self.buffer is not None
        for parameter in self._model.values():
            parameter.grad = None
        self.buffer.holder = None
        self.buffer = None

    def _views_of(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            piece.name: flat[piece.start : piece.stop].view(piece.shape)
            for piece in self.layout.pieces
        }
