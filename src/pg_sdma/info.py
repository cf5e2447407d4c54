"""What `pg-sdma info` reports: the machine, the settings, and the route that calls take here."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pg_sdma import __version__, _extension, gpu_links, kernels, machine, tuning
from pg_sdma.bench import probe
from pg_sdma.bench.launch import UsageError, check_gpus
from pg_sdma.settings import DEFAULT_BOUNDS, Settings, read_settings, variables

DRIVERS = {"libcuda.so.1": "cuDriverGetVersion", "libamdhip64.so": "hipDriverGetVersion"}
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
# What torch, the CUDA driver and ROCm read, and the direct route depends on.
RELATED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GPU_MAX_HW_QUEUES",
    "GPU_STREAMOPS_CP_WAIT",
    "HSA_ENABLE_SDMA",
    "ROC_P2P_SDMA_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISTRIBUTED_DEBUG",
)
Report = dict[str, Any]


def report(ranks: int | None, seconds: float) -> Report:
    """Everything, as JSON has it. Gathers for `seconds` on each device type that there is.

    `ranks` are those of the CPU self-test, and at most those of the GPUs' (None: two, and one a
    GPU).
    """
    settings = read_settings()
    why_no_extension = _why_no_extension()
    why_not = why_no_extension or ("" if settings.enabled else "PG_SDMA=off")
    tests = [
        probe.not_tried(device, why) if why else probe.probe(device, number, seconds)
        for device, number, why in _plan(settings, ranks, why_not)
    ]
    return {
        **_machine(settings, why_no_extension),
        "settings": settings_in_force(),
        "environment": {name: os.environ[name] for name in RELATED_VARIABLES if name in os.environ},
        "routes": [_route(settings, test) for test in tests],
        # On the tensors that matter here: the GPUs', where there are any.
        "direct_works": tests[-1].works,
    }


def settings_in_force(environ: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Each variable with its value in words and where that comes from."""
    found = []
    for variable in variables().values():
        text = environ.get(variable.name, "").strip()
        found.append(
            {
                "name": variable.name,
                "value": text or variable.default.replace("`", ""),
                "from": "environment" if text else "default",
            }
        )
    return found


def bounds_in_force(settings: Settings, device: str, ranks: int) -> dict[str, Any]:
    """From how many bytes on each kind of call goes direct ("never" included), and who says so."""
    found = tuning.look_up(settings, device, ranks)
    bounds: dict[str, int | str] = {}
    bounds.update(DEFAULT_BOUNDS[device])
    source = "default"
    if settings.min_bytes is not None:
        bounds.update(dict.fromkeys(bounds, settings.min_bytes), coalesced=0)
        source = "PG_SDMA_MIN_BYTES"
    elif found.entry is not None:
        bounds |= found.entry.bounds
        source = f"{found.path}, measured {found.entry.made}"
    if device == "cpu":  # where nothing but the size is looked at
        bounds["reduce_scatter"] = bounds["all_gather"]
    bounds = {name: size for name, size in bounds.items() if _operation(name) in settings.ops}
    path = None if found.path is None else str(found.path)
    return {
        "bytes": bounds,
        "from": source,
        "tuning_file": {"path": path, "why_not_used": found.why_none, "ignored": found.ignored},
    }


def _operation(bound: str) -> str:
    return "reduce_scatter" if bound == "reduce_scatter" else "all_gather"


def _plan(settings: Settings, ranks: int | None, why_not: str) -> list[tuple[str, int, str]]:
    """(device, ranks, why it is not tried) of each device type; the one that matters last."""
    plan = [("cpu", ranks or 2, why_not)]
    gpus = torch.cuda.device_count()
    if gpus > 0:
        number = min(gpus, ranks or gpus)
        if gpus < 2:
            number, why_one = 2, "torch sees one GPU, and a group needs two"
            try:
                check_gpus(number, gpus, settings)
            except UsageError:
                why_not = why_not or why_one
        plan.append(("cuda", number, why_not))
    return plan


def _route(settings: Settings, test: probe.Outcome) -> dict[str, Any]:
    ranks = test.ranks or 2
    return {
        "name": "GPU tensors" if test.device == "cuda" else "CPU tensors",
        "self_test": asdict(test),
        "auto": _auto(settings, test) if test.works else "",
        "why_not_faster": _why_not_faster(settings, test),
        "bounds": bounds_in_force(settings, test.device, ranks),
    }


def _auto(settings: Settings, test: probe.Outcome) -> str:
    """What carries the direct route here."""
    if test.transport == "mori":
        return "mori, by the copy engines of AMD GPUs"
    if test.transport == "slots":
        return (
            f"slots of {_slot_bytes(settings, test.ranks)} bytes in shared memory, and pulls "
            "(process_vm_readv) where those are faster"
        )
    if test.device == "cuda":
        return "each rank's copy engine writes into its peers' tensors"
    return "each rank pulls from its peers' memory (process_vm_readv)"


def _why_not_faster(settings: Settings, test: probe.Outcome) -> list[str]:
    if test.ranks == 0:
        return []
    if test.wrong:
        return ["bytes were wrong: set PG_SDMA=off, and report this"]
    if not test.works:
        inner = settings.inner_backend(test.device)
        return [f"{inner} carries all-gathers: {test.route.removeprefix('inner: ')}"]
    reasons = []
    if test.route != "direct":
        reasons.append(f"not all calls went direct: {test.route}")
    if test.transport == "mori" and settings.transport == "mori":
        reasons.append("no peer copies: PG_SDMA_TRANSPORT=mori")
    elif test.transport == "mori":
        reasons.append("no peer copies: the vote refused them (docs/mori.md)")
    if test.device == "cpu" and test.transport == "pull":
        reasons.append(f"no slots of shared memory: {_why_no_slots(settings, test.ranks)}")
    return reasons


def _slot_bytes(settings: Settings, ranks: int) -> int:
    """Bytes of a slot of the CPU tensors' shared memory; 0 where so many ranks have none."""
    return _extension.load()._slot_bytes(ranks, settings.ring)


def _why_no_slots(settings: Settings, ranks: int) -> str:
    if settings.transport == "peer":
        return "PG_SDMA_TRANSPORT=peer"
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        return f"{ranks} ranks share {cores} cores, and each would need its own"
    return f"of 2 MiB, {ranks} ranks would have too little each"


def _machine(settings: Settings, why_no_extension: str) -> Report:
    drivers = {name: _driver_version(name, call) for name, call in DRIVERS.items()}
    if torch.cuda.device_count():
        drivers["kernel module"] = f"version {machine.driver('cuda')}"
    return {
        "pg_sdma": __version__,
        "extension": why_no_extension or f"built for torch {_extension.load().torch_version}",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host": machine.host(),
        "processors": machine.device_name("cpu"),
        "cores": len(os.sched_getaffinity(0)),
        "yama": f"ptrace_scope {YAMA.read_text().strip()}" if YAMA.exists() else "not active",
        "gpus": _gpus(settings),
        "drivers": drivers,
        "kernels": _kernel(),
    }


def _gpus(settings: Settings) -> list[Report]:
    count = torch.cuda.device_count()
    known: list[gpu_links.Gpu] = []
    if count and torch.version.cuda:
        try:
            known = gpu_links.gpus(settings.driver or "libcuda.so.1")
        except OSError:
            known = []  # the self-test names the trouble
    found = []
    for i in range(count):
        links = {
            j: "peer access" if torch.cuda.can_device_access_peer(i, j) else "no peer access"
            for j in range(count)
            if j != i
        }
        engines = None
        if len(known) == count:
            links, engines = known[i].links, known[i].copy_engines
        properties = torch.cuda.get_device_properties(i)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "copy_engines": engines,
                "links": {str(j): link for j, link in links.items()},
            }
        )
    return found


def _why_no_extension() -> str:
    try:
        _extension.load()
    except ImportError as error:
        return str(error)
    return ""


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


def _driver_version(library: str, call: str) -> str:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return "not there"
    version = ctypes.c_int()
    result = getattr(driver, call)(ctypes.byref(version))
    return f"version {version.value}" if result == 0 else f"there; {call} gave error {result}"
