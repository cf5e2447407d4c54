"""What a parameter's `.grad` is while the gradient itself is in shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ShardedGradient(Tensor):
    """Has the gradient's shape and dtype, and no memory.

    Users drop gradients by setting `.grad` to None or to zero: then this one is gone, or `dropped`.
    Whatever else is computed with it would be wrong without a word, so it raises RuntimeError.
    """

    dropped: bool
    words: str

    # A look at a shape is no use of the gradient.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(parameter: Tensor, dtype: torch.dtype, words: str) -> ShardedGradient:
        """In place of the gradient of `parameter`; `words` begin the error's message."""
        element = torch.zeros((), dtype=dtype, device=parameter.device)
        made: ShardedGradient = torch.Tensor._make_subclass(
            ShardedGradient, element.expand(parameter.shape)
        )
        made.dropped = False
        made.words = words
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first: Any = args[0] if args else None
        of_many = isinstance(first, (list, tuple))
        mine = [t for t in (first if of_many else args) if isinstance(t, ShardedGradient)]
        if func in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            for gradient in mine:
                gradient.dropped = True
            others = [t for t in first if not isinstance(t, ShardedGradient)] if of_many else []
            if others:
                torch._foreach_zero_(others)
            return None if of_many else first
        if func is torch.ops.aten.detach.default:
            return first
        words = mine[0].words if mine else "ZeRO-2: a gradient"
        raise RuntimeError(
            f"{words} is in shards ({func}); call clip_grad_norm_ or grad_norm of the Zero2, or, "
            "after its finish(), look at the .grad of its parameters()"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"
