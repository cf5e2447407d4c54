"""The model as its user sees it: what is put in the place of a parameter comes back to its unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pg_sdma.zero2.unit import Run, ShardedUnit

# Which binding a module's parameters are of. The hook that follows load_state_dict looks here: it
# has to be a plain function for the model to stay copyable.
_bindings: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Binding]] = weakref.WeakKeyDictionary()


class Binding:
    """Between the modules of a model and the units of its parameters.

    A model that is bound already is released from what it was bound by.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        forget: Callable[[], None],
    ) -> None:
        self.bound = True
        self._forget = forget  # what else hangs on the parameters
        self._where = run.where
        self._units = units
        self._unit_of = {name: unit for unit in units for name in unit.model}
        name_of = {parameter: name for unit in units for name, parameter in unit.model.items()}
        # Where the model finds its parameters: shared ones in several places.
        self._places = [
            (module, key, parameter, name_of[parameter])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter in name_of
        ]
        self._hooks = []
        for module in dict.fromkeys(module for module, *_ in self._places):
            _bindings[module] = weakref.ref(self)
            self._hooks.append(module.register_load_state_dict_post_hook(_adopt_after_loading))

    @torch.no_grad()
    def adopt(self) -> None:
        """Takes back parameters that were given other memory, or were replaced, with the values
        that they have now.

        Raises RuntimeError where one has become something else, or has a gradient already.
        """
        for module, key, parameter, name in self._places:
            found = module._parameters.get(key)
            if found is parameter:
                continue
            if found is None or found.grad is not None:
                raise RuntimeError(
                    f"{self._where}: {name} was replaced, so that its gradient is lost; change a "
                    "parameter in place, or wrap the model anew"
                )
            self._unit_of[name].accept(name, found)
            module._parameters[key] = parameter
        for unit in self._units:
            unit.adopt()

    def release(self) -> None:
        """Leaves the parameters to the model."""
        self._forget()
        self.adopt()
        for hook in self._hooks:
            hook.remove()
        for module in {module for module, *_ in self._places}:
            if _binding(module) is self:
                del _bindings[module]
        for unit in self._units:
            unit.let_go()
        self.bound = False


def binding_of(model: nn.Module) -> Iterator[Binding]:
    """What binds modules of the model."""
    found = (_binding(module) for module in model.modules())
    return (binding for binding in dict.fromkeys(found) if binding is not None)


def not_sharded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Frozen parameters and buffers, each once."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.numel():
            yield name, parameter
    yield from model.named_buffers()


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """The tensors, of any form, become those of the group's rank 0."""
    for tensor in tensors:
        copy = tensor.detach().contiguous()
        dist.broadcast(copy, group=group, group_src=0)
        tensor.copy_(copy)


def _adopt_after_loading(module: nn.Module, _: Any) -> None:
    binding = _binding(module)
    if binding is not None:
        binding.adopt()


def _binding(module: nn.Module) -> Binding | None:
    reference = _bindings.get(module)
    return None if reference is None else reference()
