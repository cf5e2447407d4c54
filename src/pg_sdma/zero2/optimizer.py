"""AdamW over the shards of a Zero2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.adamw import adamw

from pg_sdma.zero2.sharded import Zero2

CHUNK = 2**24  # elements whose gradients are widened at a time
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, element by element, on this rank's part of the parameters.

    `params` are parameters of the model or of `zero`, or groups of them with options of their own;
    all by default. `param_groups` then hold this rank's parts. Gradients may be narrower than the
    parameters: they are widened some at a time. The state has the form and the dtype of the
    parameters. `step` completes the gradients first and gives the model the new parameters
    afterwards, and drops the gradients that it has used; it is collective, and waits for nothing on
    the host, except under a `torch.amp.GradScaler`: that one's look for what is not finite then
    counts for all ranks.

    Raises ValueError for parameters that are not the model's.
    """

    # GradScaler.step then calls `step` in any case, with itself.
    _step_supports_amp_scaling = True

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
        self._names: list[list[str]] = []  # of each group's parameters, the other ranks' too
        groups: list[Any] = list(zero.model.parameters() if params is None else params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]  # of a small model a rank may own nothing
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; the parameters may be the model's or those of the Zero2."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        owned = dict(self._zero.named_parameters())
        names = self._zero.names_of(params)
        mine = [owned[name] for name in names if name in owned]
        super().add_param_group({**param_group, "params": mine})
        self._names.append(names)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> Any:
        """One step; returns what `closure`, called first if given, has returned.

        `grad_scaler` is what GradScaler.step gives. Raises RuntimeError where its `unscale_` was
        called before the gradients were complete.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        complete = self._zero.complete
        self._zero.finish()
        if grad_scaler is not None and self._overflow(grad_scaler, complete):
            self.zero_grad()
            return loss
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
        self._zero.gather(self._all_names())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops this optimizer's gradients that no step has used; after a step there are none."""
        self._zero.zero_grad(self._all_names())

    def state_dict(self) -> dict[str, Any]:
        """Moments as DTensors of the model's shapes, by the parameters' names; collective.

        The same keys on every rank, and before the first step too, so that
        torch.distributed.checkpoint saves it, and loads into it, on any number of ranks. Raises
        RuntimeError between the micro-steps of a step.
        """
        owned = dict(self._zero.named_parameters())
        self._zero.refuse_within_step("the optimizer's state_dict")
        everyone: list[Any] = [None] * self._zero.group.size()
        steps = {
            name: float(self._state_of(owned[name])["step"])
            for name in self._all_names()
            if name in owned
        }
        dist.all_gather_object(everyone, (self._names, steps), group=self._zero.group)
        groups: list[list[str]] = [
            list(dict.fromkeys(name for names, _ in everyone for name in names[index]))
            for index in range(len(self._names))
        ]
        steps = {name: step for _, others in everyone for name, step in others.items()}
        order = {name: index for index, name in enumerate(self._zero.names)}
        wanted = {name for names in groups for name in names}
        moments = {
            moment: self._zero.as_dtensors(wanted, self._values(moment)) for moment in _MOMENTS
        }
        return {
            "state": {
                name: {
                    "step": torch.tensor(steps[name]),
                    **{moment: moments[moment][name] for moment in _MOMENTS},
                }
                for name in sorted(wanted, key=order.__getitem__)
            },
            "param_groups": [
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": sorted(names, key=order.__getitem__),
                }
                for group, names in zip(self.param_groups, groups, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a `state_dict`, of any number of ranks; collective.

        Raises ValueError, on the ranks that see it, for a state of other parameters, and on all
        others RuntimeError.
        """
        self._zero.refuse_within_step("the optimizer's load_state_dict")
        state, groups = state_dict["state"], state_dict["param_groups"]
        own = {"state": dict.fromkeys(self._all_names())}
        error = None
        if len(groups) != len(self._names):
            error = ValueError(
                f"{self._zero.where}: the state has {len(groups)} groups of parameters, the "
                f"optimizer {len(self._names)}; make the groups that the state was saved with"
            )
        elif missing := [name for name in own["state"] if name not in state]:
            error = ValueError(
                f"{self._zero.where}: the state has nothing of {missing[0]}; load the state of the "
                "same model and groups"
            )
        else:
            for moment in _MOMENTS:
                saved = {name: entry[moment] for name, entry in state.items()}
                shapes = {n: s for n, s in self._zero.shapes.items() if n in saved}
                error = error or self._zero.mismatch(shapes, saved)
        self._zero.agree("loading the optimizer's state", error, tuple(state))
        for moment in _MOMENTS:
            self._zero.take_values(
                {name: entry[moment] for name, entry in state.items()},
                self._values(moment),
            )
        for name, parameter in self._zero.named_parameters():
            if name in state:
                self._state_of(parameter)["step"] = torch.tensor(float(state[name]["step"]))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _overflow(self, scaler: GradScaler, complete: bool) -> bool:
        """Unscales, and asks all ranks whether anything is not finite."""
        # The scaler keeps what it has found where `update` looks for it.
        record = scaler._per_optimizer_states[id(self)]
        if record["stage"] is OptState.READY:
            scaler.unscale_(self)
        elif not complete:
            raise RuntimeError(
                f"{self._zero.where}: GradScaler.unscale_ was called before the gradients were "
                "complete; call the Zero2's finish() before it"
            )
        found = torch.zeros((), device=self._zero.device)
        for one in record["found_inf_per_device"].values():
            found += one.to(found.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._zero.group)
        record["found_inf_per_device"] = {found.device: found.reshape(1)}
        return bool(found.item())

    def _all_names(self) -> list[str]:
        return [name for names in self._names for name in names]

    def _values(self, moment: str) -> Callable[[nn.Parameter], Tensor]:
        return lambda parameter: self._state_of(parameter)[moment]

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
    numel = 0
    for parameter in parameters:
        chunk.append(parameter)
        numel += parameter.numel()
        if numel >= CHUNK:
            yield chunk
            chunk, numel = [], 0
    if chunk:
        yield chunk
