"""AdamW over the shards of a Zero2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pg_sdma.zero2.sharded import Zero2

CHUNK = 2**24  # elements whose gradients are widened at a time


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, element by element, on this rank's part of the parameters.

    `params` are parameters of `zero`, or groups of them with options of their own; all by default.
    Gradients may be narrower than the parameters: they are widened some at a time. The state has
    the form and the dtype of the parameters. `step` completes the gradients first and gives the
    model the new parameters afterwards; it is collective, and waits for nothing on the host.
    """

    def __init__(
        self,
        zero: Zero2,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._zero = zero
        groups: list[Any] = list(zero.parameters() if params is None else params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]  # of a small model a rank may own nothing
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what `closure`, called first if given, has returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._zero.finish()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameters in _chunks(p for p in group["params"] if p.grad is not None):
                states = [self._state_of(parameter) for parameter in parameters]
                adamw(
                    parameters,
                    [_gradient(parameter) for parameter in parameters],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
        self._zero.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has used; after a step there are none."""
        self._zero.zero_grad()

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the host, where it is needed
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to(parameter.dtype)


def _chunks(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for parameter in parameters:
        chunk.append(parameter)
        if sum(p.numel() for p in chunk) >= CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
