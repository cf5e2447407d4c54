"""What c10d does unlike one expects: a test for each trap that a backend of its falls into.

Where a trap is NCCL's, gloo stands in for it as the inner of "cuda" (PG_SDMA_INNER), on a machine
without a GPU: creating groups and finding their backends is then the same, their tensors are not.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import init_group, run_ranks

import pg_sdma

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GLOO_FOR_CUDA = {"PG_SDMA_INNER": "cuda=gloo"}
SPLIT_SOURCE_IS_GIVEN = hasattr(dist.distributed_c10d._DistributedBackendOptions, "split_from")


def all_gather():
    """Gathers this rank's number, and returns the output."""
    output = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(output, torch.tensor([dist.get_rank()]))
    return output.tolist()


def default_backend():
    group = dist.group.WORLD
    group._has_hooks()
    return group.name(), group._get_backend(CUDA).name(), all_gather()


def test_a_group_of_two_backends_has_a_default_one():
    """Trap 1: torch <= 2.13 looks for the upper-case key of a plugin among lower-case names."""
    backend = "cpu:gloo,cuda:sdma"
    results = run_ranks(2, default_backend, backend=backend, env=GLOO_FOR_CUDA)
    assert results == [("custom", "sdma", [0, 1])] * 2


def test_the_device_types_are_not_taken_apart_into_letters():
    """Trap 2: torch <= 2.13 walks over the characters of a string of device types."""
    assert dist.distributed_c10d.BackendConfig("sdma").device_backend_map == {
        "cpu": "sdma",
        "cuda": "sdma",
    }


def one_object_for_both():
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend is dist.group.WORLD._get_backend(CUDA)
    inners = [backend.inner("cpu"), backend.inner("cuda")]
    return [inner.name() for inner in inners], inners[0] is inners[1], all_gather()


@pytest.mark.parametrize("backend", ["sdma", "cpu:sdma,cuda:sdma"])
def test_one_backend_serves_both_device_types(backend):
    """Traps 3 and 11: two plugins in a group alias each other; the creator is not told a device."""
    results = run_ranks(2, one_object_for_both, backend=backend, env=GLOO_FOR_CUDA)
    assert results == [(["gloo", "gloo"], False, [0, 1])] * 2


def split_of_a_group_that_leaves_a_rank_out():
    from pg_sdma import _inner

    asked = []
    dist.ProcessGroupGloo.perform_nocolor_split = lambda self, device: asked.append((self, device))
    group = dist.group.WORLD
    group.bound_device_id = CUDA
    inner = group._get_backend(CUDA).inner("cuda")
    # Up to 2.13 torch leaves it to the creator to find the group to split; 2.14 hands it over.
    opts = SimpleNamespace()
    if SPLIT_SOURCE_IS_GIVEN:
        opts.split_from = group._get_backend(CUDA)
    assert _inner._split_source(opts, "cuda") is inner

    dist.new_group([0])
    return asked == [(inner, CUDA)] * dist.get_rank()


def test_a_rank_left_out_of_a_split_takes_part_through_the_inner():
    """Trap 4: with a bound device torch calls NCCL's perform_nocolor_split on our object."""
    backend = "cpu:gloo,cuda:sdma"
    assert run_ranks(
        2, split_of_a_group_that_leaves_a_rank_out, backend=backend, env=GLOO_FOR_CUDA
    ) == [True, True]


def both_names():
    functions = [dist.all_gather_into_tensor]
    if hasattr(dist, "all_gather_single"):
        functions.append(dist.all_gather_single)
    outputs = []
    for function in functions:
        output = torch.empty(2)
        function(output, torch.tensor([float(dist.get_rank())]))
        outputs.append(output.tolist())
    return outputs == [[0.0, 1.0]] * len(functions)


@pytest.mark.parametrize("enabled", ["on", "off"])
def test_both_names_of_an_all_gather_work(enabled):
    """Trap 5: torch 2.14 renames _allgather_base, and each name forwards to the other."""
    assert run_ranks(2, both_names, env={"PG_SDMA": enabled}) == [True, True]


RANK = """
import os, sys, time, torch, torch.distributed as dist
import pg_sdma
from pg_sdma import _C
rank = int(os.environ["RANK"])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("cpu:sdma", store=store, rank=rank, world_size=2)
x = torch.full((50_000,), float(rank))
"""

LEAVING = {
    "without destroying the group": """
dist.all_gather_into_tensor(torch.empty(100_000), x)
""",
    "one long before the other": """
dist.all_gather_into_tensor(torch.empty(100_000), x)
time.sleep(3 * rank)
""",
    "with operations that nobody waited for": """
kept = [dist.all_gather_into_tensor(torch.empty(100_000), x, async_op=True) for _ in range(8)]
kept += [dist.all_reduce(x.clone(), async_op=True) for _ in range(8)]
""",
    "with operations that nobody kept": """
for _ in range(8):
    dist.all_gather_into_tensor(torch.empty(100_000), x.clone(), async_op=True)
    dist.all_reduce(x.clone(), async_op=True)
""",
    "with destroying the group": """
kept = [dist.all_gather_into_tensor(torch.empty(100_000), x, async_op=True) for _ in range(8)]
dist.destroy_process_group()
""",
}


def run_program(program, folder):
    """Runs `program` as two ranks. Returns their exit codes and what they wrote."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder / "store")],
            env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.parametrize("way", LEAVING)
def test_a_program_may_end(way, tmp_path):
    """Traps 6 and 10: torch shuts nothing down at exit, and a worker thread that drops a tensor's
    last reference after Python has ended aborts the process."""
    codes, outputs = run_program(RANK + LEAVING[way], tmp_path)
    assert codes == [0, 0], "\n".join(outputs)


def test_groups_that_were_not_destroyed_are_detached_at_exit(tmp_path):
    """Trap 6: torch does not call shutdown() on them."""
    program = RANK + (
        "_C.detach = lambda groups: [print('detached', group.size()) for group in groups]\n"
        "others = [dist.new_group([0]), dist.new_group([1])]\n"
        "gone = dist.new_group([0, 1])\n"
        "dist.destroy_process_group(gone)\n"
    )
    codes, outputs = run_program(program, tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("detached")]
        assert sorted(lines) == ["detached 1", "detached 2"], output


def stats_behind_the_wrapper():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init_group("cpu:sdma")
    wrapper = dist.group.WORLD._get_backend(CPU)
    return (
        type(wrapper).__name__,
        all_gather(),
        sum(route["calls"] for routes in pg_sdma.stats().values() for route in routes.values()),
    )


def test_debug_detail_is_looked_through():
    """Trap 7: TORCH_DISTRIBUTED_DEBUG=DETAIL puts a _ProcessGroupWrapper in front of us."""
    results = run_ranks(2, stats_behind_the_wrapper, backend=None)
    assert results == [("_ProcessGroupWrapper", [0, 1], 1)] * 2


def state_without_references():
    all_gather()
    before = pg_sdma.stats()
    gc.collect()
    backend = dist.group.WORLD._get_backend(CPU)
    return before == pg_sdma.stats() and bool(before), type(backend).__name__


def test_state_outlives_the_python_object():
    """Trap 8: up to torch 2.13 the Python object of a backend, with what was set on it, goes when
    the last Python reference does; the group holds the C++ object alone."""
    assert run_ranks(2, state_without_references) == [(True, "SdmaBackend")] * 2


def sequence_numbers():
    backend = dist.group.WORLD._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    return backend._get_sequence_number_for_group() - before


def test_the_backend_has_sequence_numbers():
    """Trap 9: up to torch 2.13 the *group* refuses them to every backend but its own."""
    assert run_ranks(2, sequence_numbers) == [1, 1]
