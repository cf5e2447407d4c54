"""Trains a byte-level GPT or Qwen3 with DeepSpeed, over pg_sdma or over the backend that it wraps.

    torchrun --standalone --nproc-per-node 2 examples/train_zero3.py --compare

Runs on any machine; on CPU unless torch sees a GPU. DeepSpeed's own launcher works, too. The two
runs differ only in the string that `deepspeed.init_distributed` is given.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from common.gpt import GPTConfig
from common.loop import Run, run_steps
from common.markdown import comparison_page, gain_percent
from common.options import backend_string
from common.report import (
    max_abs_loss_difference,
    require_extras,
    run_of,
    title,
    write_report,
)
from common.session import deterministic_kernels
from common.text import ByteBatches, load_text
from zero3.engine import (
    Training,
    deepspeed_config,
    device_has_bf16,
    process_group,
    rank_device,
    require_deepspeed,
    share_of_all_groups,
)
from zero3.models import parameter_count
from zero3.options import model_config, parse
from zero3.processes import require_launcher, run_in_turn


def train(options: argparse.Namespace) -> None:
    """One run from the seed over one transport; rank 0 writes its report."""
    backend = backend_string(options.transport, options.device)
    device = rank_device(options.device)
    with process_group(backend, device), deterministic_kernels(options.deterministic):
        config = deepspeed_config(options, bf16=device_has_bf16())
        run, batch = run_from_seed(options, config, backend, device)
        setup = describe(options, config, batch)
        rank = dist.get_rank()
    if rank == 0:
        write_report([run], setup, options.out)


def run_from_seed(
    options: argparse.Namespace, config: dict[str, Any], backend: str, device: torch.device
) -> tuple[Run, int]:
    """The run, and its sequences a step on each rank. The engine is gone when this returns."""
    training = Training(model_config(options), config, options.seed)
    batches = ByteBatches(
        load_text(options.data),
        batch=training.batch,
        seq=model_config(options).seq,
        seed=options.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    run = run_steps(
        training.step,
        batches,
        device,
        transport=options.transport,
        backend=backend,
        steps=range(options.steps),
        warmup=options.warmup,
        sync_every_step=options.sync_every_step,
    )
    share = share_of_all_groups() if options.transport == "sdma" else None
    return replace(run, fast_path_share=share), training.batch


def describe(options: argparse.Namespace, config: dict[str, Any], batch: int) -> dict[str, Any]:
    """What a report says of its runs beside what was measured."""
    import deepspeed

    model = model_config(options)
    zero = config["zero_optimization"]
    hpz = zero.get("zero_hpz_partition_size", 1)
    return {
        "trainer": f"DeepSpeed ZeRO-{zero['stage']}" + (f", hpZ {hpz}" if hpz > 1 else ""),
        "model_name": options.model,
        "family": "GPT" if isinstance(model, GPTConfig) else "Qwen3",
        "model": asdict(model),
        "parameters": parameter_count(model),
        "param_dtype": "bf16" if "bf16" in config else "fp32",
        "ranks": dist.get_world_size(),
        "batch_per_rank": batch,
        "device_name": "CPU" if options.device == "cpu" else torch.cuda.get_device_name(),
        "sync_every_step": options.sync_every_step,
        "deepspeed": deepspeed.__version__,
        "deepspeed_config": config,
    }


def compare(options: argparse.Namespace, argv: list[str]) -> None:
    """Trains over inner and over sdma, each in processes of its own, and reports on rank 0.

    Exits with an error where deterministic operations gave different losses.
    """
    require_extras()
    folders = {transport: options.out / transport for transport in ("inner", "sdma")}
    own = [argument for argument in argv if argument != "--compare"]
    # The last of an option given twice counts.
    rank = run_in_turn(
        [*own, "--transport", transport, "--out", str(folder)]
        for transport, folder in folders.items()
    )
    if rank != 0:
        return
    contents = [json.loads((folder / "result.json").read_text()) for folder in folders.values()]
    inner, sdma = runs = [run_of(content) for content in contents]
    setup = {**contents[0], "gain_percent": gain_percent(inner, sdma)}
    write_report(runs, setup, options.out)
    command = shlex.join(["train_zero3.py", *argv])
    page = comparison_page(inner, sdma, title(setup), command)
    (options.out / "result.md").write_text(page)
    print(options.out / "result.md")
    deterministic = options.device == "cpu" or options.deterministic
    if deterministic and max_abs_loss_difference(inner, sdma) != 0:
        sys.exit("the two routes' losses differ, though every operation is deterministic")


def main(argv: list[str] = sys.argv[1:]) -> None:
    options = parse(argv)
    require_launcher()
    require_deepspeed(options)
    compare(options, argv) if options.compare else train(options)


if __name__ == "__main__":
    main()
