"""Makes the backend name "sdma" known to torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "sdma"


def create(opts: Any, pg_options: Any = None) -> Any:
    """Creates the backend of one group; imports everything heavy only now. See creator.create."""
    from pg_sdma import creator

    return creator.create(opts, pg_options)


def register() -> None:
    """Registers "sdma" for CPU and CUDA (ROCm is "cuda" to torch) tensors. Idempotent.

    Raises RuntimeError when something else has registered that name, and ImportError when this
    torch has no torch.distributed.
    """
    if not dist.is_available():
        raise ImportError("pg_sdma needs a torch that was built with torch.distributed")
    plugin = dist.Backend._plugins.get(NAME.upper())
    if plugin is not None:
        if plugin.creator_fn is create:
            return
        raise RuntimeError(
            f"the torch.distributed backend '{NAME}' is already registered, by module "
            f"{plugin.creator_fn.__module__}: uninstall either its package or pg-sdma"
        )
    # A list: torch <= 2.13 walks over the characters of a string.
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        _put_lower_case_alias_first(dist.Backend._plugins)


def _put_lower_case_alias_first(plugins: dict[str, Any]) -> None:
    """Lets "cpu:gloo,cuda:sdma" find its default backend on torch <= 2.13.

    There, such a group gets a default backend only if the *first* key of the plugin table is among
    the lower-case names of its configuration; the key that register_backend made is upper-case.
    """
    others = dict(plugins)
    plugins.clear()
    plugins[NAME] = others[NAME.upper()]
    plugins.update(others)
