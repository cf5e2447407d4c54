"""`pg-sdma info`: the machine, the settings, and the route that all-gathers take here."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
from pathlib import Path

import torch

from pg_sdma import __version__, _extension, kernels, stats, transports
from pg_sdma.bench.all_gather import all_gather
from pg_sdma.bench.launch import World, run_ranks
from pg_sdma.settings import variables

DRIVERS = {"libcuda.so.1": "cuDriverGetVersion", "libamdhip64.so": "hipDriverGetVersion"}
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
# What torch and the CUDA driver read, and the direct route depends on.
RELATED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISTRIBUTED_DEBUG",
)


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="what runs here, and why not something faster",
        description="The machine, the settings, and the route that an all-gather takes here: two "
        "CPU ranks, and a rank a GPU where there are several, make a group and gather.",
    )
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    for name, text in (*machine(), *settings_in_force()):
        print(f"{name:<16}{text}")
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print(f"{'GPU tensors':<16}not tried: torch sees {gpus} GPUs, and a group needs two")
    sys.stdout.flush()  # the ranks print by themselves
    status = 0
    for device in ("cpu", "cuda") if gpus > 1 else ("cpu",):
        status |= run_ranks(probe, argparse.Namespace(device=device, ranks=None))
    return status


def machine() -> list[tuple[str, str]]:
    """(name, text) of what the route depends on."""
    return [
        ("pg_sdma", f"{__version__}, {_extension_state()}"),
        ("torch", f"{torch.__version__}, Python {platform.python_version()}"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *((f"GPU {i}", text) for i, text in enumerate(_gpus())),
        ("sums on GPUs", _kernel()),
        *((library, _driver_version(library, call)) for library, call in DRIVERS.items()),
        ("Yama", f"ptrace_scope {YAMA.read_text().strip()}" if YAMA.exists() else "not active"),
    ]


def settings_in_force() -> list[tuple[str, str]]:
    """(name, text) of the variables that are set, ours and those that concern us."""
    ours = [v.name for v in variables().values() if os.environ.get(v.name)]
    related = [name for name in RELATED_VARIABLES if name in os.environ]
    return [
        ("settings", " ".join(f"{name}={os.environ[name]}" for name in ours) or "the defaults"),
        *(("environment", f"{name}={os.environ[name]}") for name in related),
    ]


def probe(world: World, options: argparse.Namespace) -> None:
    """Gathers once over sdma and prints on rank 0 which way that went."""
    group = world.group("sdma")
    # So much that every engine takes it.
    own = torch.full((1 << 24,), world.rank, dtype=torch.uint8, device=world.device)
    output = torch.empty(own.numel() * world.size, dtype=torch.uint8, device=world.device)
    all_gather(output, own, group=group)
    right = torch.equal(output.view(world.size, -1)[:, 0].cpu(), torch.arange(world.size))
    # Nothing is counted where PG_SDMA_OPS leaves all-gathers out.
    (route,) = next(iter(stats(group).values()), ["inner: PG_SDMA_OPS"])
    if route == "direct":
        route += f" ({transports(group)[world.device.type]})"
    if world.rank == 0:
        name = "GPU tensors" if world.device.type == "cuda" else "CPU tensors"
        wrong = "" if right else ", and the output was wrong"
        print(f"{name:<16}{route}, with {world.size} ranks{wrong}", flush=True)
    if not right:
        raise SystemExit(1)


def _extension_state() -> str:
    try:
        return f"built for torch {_extension.load().torch_version}"
    except ImportError as error:
        return str(error)


def _kernel() -> str:
    """What sums the reduce-scatters of GPU tensors where PG_SDMA_OPS names them."""
    if why_none := kernels.why_none():
        return f"none: {why_none}"
    if torch.cuda.device_count() == 0:
        return "not tried: torch sees no GPU"
    try:
        kernel = kernels.compile_for(0, "BFloat16", world=2, rank=0, kind=0, aligned=True)
    except Exception as error:  # whatever Triton, its compiler or the driver raise
        return f"none: {error}"
    return (
        f"a kernel of at most {kernel.blocks} blocks of {kernel.threads} threads, "
        f"{kernel.registers} registers a thread (bf16, 2 ranks)"
    )


def _gpus() -> list[str]:
    """Each GPU's name, and the GPUs whose memory it can reach."""
    count = torch.cuda.device_count()
    found = []
    for i in range(count):
        peers = [str(j) for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        reach = f"reaches the memory of GPU {', '.join(peers)}" if peers else "reaches no other"
        found.append(f"{torch.cuda.get_device_name(i)}, {reach}")
    return found


def _driver_version(library: str, call: str) -> str:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return "not there"
    version = ctypes.c_int()
    result = getattr(driver, call)(ctypes.byref(version))
    return f"version {version.value}" if result == 0 else f"there; {call} gave error {result}"
