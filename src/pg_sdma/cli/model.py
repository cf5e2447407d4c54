"""`pg-sdma model`."""

from __future__ import annotations

import argparse
import json

from pg_sdma import model, model_page
from pg_sdma.bench.launch import UsageError
from pg_sdma.cli.common import comma_list, size


def add(commands: argparse._SubParsersAction) -> None:
    titles = ", ".join(f"{name} ({machine.title})" for name, machine in model.MACHINES.items())
    parser = commands.add_parser(
        "model",
        help="estimate how gathers grow with the number of ranks",
        description="An alpha-beta model of direct all-gathers on machines that need not be here: "
        "what a call costs the host and the device with more and more ranks, and gathers of some "
        "sizes. No measurement; docs/scaling.md says what it leaves out.",
    )
    parser.set_defaults(parser=parser, command=command)
    parser.add_argument(
        "machines",
        nargs="*",
        metavar="MACHINE",
        help=f"which of {titles}; without one all of them",
    )
    parser.add_argument(
        "--sizes",
        type=comma_list(size),
        default="4M,64M,1G",
        help="outputs over all ranks, in bytes (%(default)s)",
    )
    parser.add_argument(
        "--set",
        type=_change,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value for a constant that the first table names, in its unit; again for more",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE with a number") from None


def command(options: argparse.Namespace) -> int:
    names = options.machines or list(model.MACHINES)
    for name in names:
        if name not in model.MACHINES:
            raise UsageError(f"{name!r} is none of {', '.join(model.MACHINES)}")
    try:
        made = model.Model(dict(options.set))
    except ValueError as error:
        raise UsageError(f"--set: {error}") from None
    if options.json:
        print(json.dumps(model_page.as_json(made, names, options.sizes), indent=1))
    else:
        print(model_page.page(made, names, options.sizes), end="")
    return 0
