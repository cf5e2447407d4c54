"""DeepSpeed: its process group, its configuration, and a model's engine with its step."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from common.session import leave_group
from pg_sdma import stats
from pg_sdma.stats import direct_share
from zero3.models import ModelConfig, initialise, model_maker


def require_deepspeed(options: argparse.Namespace) -> None:
    """Exits with what to install, where this environment cannot run the model that is asked for."""
    needed = ["deepspeed"] + (["transformers"] if options.model.startswith("qwen3") else [])
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"this environment lacks {' and '.join(missing)}. In a working copy:\n"
            "    make setup-zero3\n"
            "elsewhere (--no-build-isolation, for DeepSpeed is built with the torch there is):\n"
            "    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8 transformers"
        )


@contextmanager
def process_group(backend: str, device: torch.device) -> Iterator[None]:
    """The default group over `backend`, and DeepSpeed on `device`, for the length of the block.

    DeepSpeed hands the string on to torch unchanged, but only here: `deepspeed.initialize` would
    make a group of its accelerator's own backend.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    # DeepSpeed calls them by these names, and would have torch say so at every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend)
    yield
    leave_group(deepspeed.comm.destroy_process_group)


def rank_device(kind: str) -> torch.device:
    """This rank's device, made the current one. Exits where a rank has no GPU of its own."""
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"rank {os.environ['RANK']} is number {local_rank} on its host, which has "
            f"{torch.cuda.device_count()} GPUs: DeepSpeed needs one a rank"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def deepspeed_config(options: argparse.Namespace, bf16: bool) -> dict[str, Any]:
    """The configuration file's content, with what the command line says in its place.

    `bf16` says whether the device computes in bfloat16: if not, training is in fp32 whatever the
    file says.
    """
    config: dict[str, Any] = json.loads(options.ds_config.read_text())
    zero = config.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)  # DeepSpeed's default
    if options.batch is not None:
        config["train_micro_batch_size_per_gpu"] = options.batch
        config.pop("train_batch_size", None)  # follows from it
    if options.stage is not None:
        zero["stage"] = options.stage
    if options.hpz is not None:
        zero["zero_hpz_partition_size"] = options.hpz
    if options.lr is not None:
        optimizer = config.setdefault("optimizer", {"type": "AdamW"})
        optimizer.setdefault("params", {})["lr"] = options.lr
    if not bf16:
        config.pop("bf16", None)
    return config


def device_has_bf16() -> bool:
    """Whether DeepSpeed computes in bfloat16 on its device."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_bf16_supported())


class Training:
    """A DeepSpeed engine around a model whose weights come from `seed` alone."""

    def __init__(self, model_config: ModelConfig, config: dict[str, Any], seed: int) -> None:
        import deepspeed

        make_model = model_maker(model_config)
        partitioned = config["zero_optimization"]["stage"] == 3
        # zero.Init partitions each module as it is made: no rank ever holds the whole model.
        with deepspeed.zero.Init(config_dict_or_path=config) if partitioned else nullcontext():
            model = make_model()
        whole = partial(deepspeed.zero.GatheredParameters, modifier_rank=0)
        initialise(model, seed, whole if partitioned else nullcontext)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    @property
    def batch(self) -> int:
        """Sequences a step on each rank: the configuration's, which may say it in several ways."""
        return int(self.engine.train_micro_batch_size_per_gpu())

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on int64 (batch, seq) tensors; returns this rank's loss."""
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss


def share_of_all_groups() -> float | None:
    """The part of this rank's bytes of `stats` that went direct; None where there were none.

    Over every group: DeepSpeed gathers over the default one, and over clones and parts of it.
    """
    routes = {
        f"{number} {operation}": by_route
        for number, group in enumerate(list(c10d._world.pg_map))
        for operation, by_route in stats(group).items()
    }
    share = direct_share(routes)
    return None if share != share else share
