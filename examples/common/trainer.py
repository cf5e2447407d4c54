"""The main program of a trainer: one run, or one over each backend, and the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from common.gpt import GPT
from common.loop import Run
from common.options import backend_string, model_config
from common.report import max_abs_loss_difference, require_extras, write_report
from common.session import Launch, deterministic_kernels

# Trains over the default group, which is there already; the texts are transport and backend string.
Train = Callable[[Launch, argparse.Namespace, str, str], Run]


def run_trainer(name: str, options: argparse.Namespace, train: Train) -> None:
    """Calls `train` over the route that `options` names, or over both in turn, and reports.

    Exits with an error where two runs of deterministic operations had different losses.
    """
    if options.compare:
        require_extras()
    launch = Launch(options.device)
    runs = []
    for transport in ("inner", "sdma") if options.compare else (options.transport,):
        backend = backend_string(transport, options.device)
        with launch.process_group(backend), deterministic_kernels(options.deterministic):
            runs.append(train(launch, options, transport, backend))

    if launch.rank == 0:
        config = model_config(options)
        with torch.device("meta"):
            parameters = GPT(config).parameter_count()
        setup = {
            "trainer": name,
            "model": asdict(config),
            "parameters": parameters,
            "param_dtype": options.param_dtype,
            "ranks": launch.world_size,
            "batch_per_rank": options.batch,
            "device_name": launch.device_name,
            "sync_every_step": options.sync_every_step,
        }
        write_report(runs, setup, options.out)
    deterministic = options.device == "cpu" or options.deterministic
    if options.compare and deterministic and max_abs_loss_difference(*runs) != 0:
        sys.exit("the two routes' losses differ, though every operation is deterministic")
