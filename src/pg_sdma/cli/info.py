"""`pg-sdma info`: the machine, the settings, and the route that all-gathers take here."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch.distributed as dist

from pg_sdma import info, tuning
from pg_sdma.bench.launch import UsageError
from pg_sdma.cli.common import at_least

OPERATIONS = {
    "all_gather": "all-gathers",
    "coalesced": "the mean of coalesced all-gathers",
    "reduce_scatter": "reduce-scatters",
}


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="what runs here, and why not something faster",
        description="The machine, the settings, and the route that an all-gather takes here: two "
        "CPU ranks, and a rank a GPU where there are several, make a group and gather for two "
        "seconds.",
        epilog="Exit status: 0 where the direct route works here, for GPU tensors where torch sees "
        "a GPU and else for CPU tensors; 1 where it does not or was not tried, and the reason is "
        "printed.",
    )
    parser.set_defaults(parser=parser, command=command)
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        help="CPU ranks of the self-test (2); with GPUs, at most one a GPU",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="length of the self-test (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def command(options: argparse.Namespace) -> int:
    if dist.is_torchelastic_launched():
        raise UsageError("info starts the ranks of its self-test itself: run it without torchrun")
    found = info.report(options.ranks, options.seconds)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, text in lines(found):
            print(f"{name:<16}{text}")
    return 0 if found["direct_works"] else 1


def lines(found: info.Report) -> list[tuple[str, str]]:
    """(name, text) of a report, for people."""
    shown = [
        ("pg_sdma", f"{found['pg_sdma']}, {found['extension']}"),
        ("torch", f"{found['torch']}, Python {found['python']}"),
        ("system", f"{found['system']}, {found['processors']}, {found['cores']} usable"),
        ("Yama", found["yama"]),
        *((f"GPU {i}", _gpu_line(gpu)) for i, gpu in enumerate(found["gpus"])),
        *(("GPU driver", f"{name}: {text}") for name, text in found["drivers"].items()),
        ("sums on GPUs", found["kernels"]),
    ]
    ours = [s for s in found["settings"] if s["from"] != "default"]
    shown += [("setting", f"{s['name']}={s['value']} (from the {s['from']})") for s in ours]
    shown.append(("settings", f"{'the others ' if ours else ''}as by default: docs/settings.md"))
    shown += [("environment", f"{name}={value}") for name, value in found["environment"].items()]
    for route in found["routes"]:
        shown += _route_lines(route)
    last = found["routes"][-1]
    off = any(s["name"] == "PG_SDMA" and s["value"] == "off" for s in found["settings"])
    tried = "does not work" if last["self_test"]["ranks"] else "could not be tried"
    if off:
        tried = "is off, and was not tried,"
    works = "works" if found["direct_works"] else tried
    shown.append(("result", f"the direct route {works} here for {last['name']}"))
    return shown


def _route_lines(route: dict[str, Any]) -> list[tuple[str, str]]:
    name, test = route["name"], route["self_test"]
    shown = [(name, test["route"] + (f", with {test['ranks']} ranks" if test["ranks"] else ""))]
    if test["gathers"]:
        wrong = f"{test['wrong']} elements wrong" if test["wrong"] else "every byte right"
        text = f"{test['gathers']} gathers in {test['seconds']:.1f} s, {wrong}"
        if test["time"] and test["inner_time"]:
            text += (
                f"; in place, {test['size'] >> 20} MiB took {test['time'] * 1e3:.2f} ms, "
                f"{test['inner']} {test['inner_time'] * 1e3:.2f} ms"
            )
        shown.append(("  self-test", text))
    if route["auto"]:
        shown.append(("  auto takes", route["auto"]))
    shown += [("  not faster", why) for why in route["why_not_faster"]]
    bounds = route["bounds"]
    sizes = ", ".join(
        f"{OPERATIONS[name]} {'never' if size == tuning.NEVER else f'from {size} bytes on'}"
        for name, size in bounds["bytes"].items()
    )
    shown.append(("  go direct", f"{sizes} (from: {bounds['from']})"))
    file = bounds["tuning_file"]
    if file["why_not_used"]:
        where = f"{file['path']} is not used: " if file["path"] else "none: "
        shown.append(("  tuning file", f"{where}{file['why_not_used']}"))
    return shown


def _gpu_line(gpu: info.Report) -> str:
    parts = [gpu["name"], f"{gpu['memory_bytes'] / 2**30:.0f} GiB"]
    if gpu["copy_engines"] is not None:
        parts.append(f"{gpu['copy_engines']} copy engines")
    by_kind: dict[str, list[str]] = {}
    for peer, link in gpu["links"].items():
        by_kind.setdefault(link, []).append(peer)
    parts += [f"{kind} to GPU {' '.join(peers)}" for kind, peers in by_kind.items()]
    return ", ".join(parts)
