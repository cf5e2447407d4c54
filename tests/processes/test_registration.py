"""How the name "sdma" becomes known to torch, and what its creator makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pg_sdma_autoload
from pg_sdma import _extension, _inner, _registration, creator

FINDS_BACKENDS_BY_NAME = hasattr(dist.Backend, "_ensure_backend_registered")  # torch >= 2.14

installed = pytest.mark.skipif(
    not list(importlib.metadata.entry_points(group="torch.backends", name="pg_sdma")),
    reason="pg-sdma is not installed here: torch reads its entry points",
)


def python(code, **env):
    """Runs `code` in a new interpreter and returns what it wrote to stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


INIT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
print(*sorted(f"{{d}}={{group._get_backend(d).name()}}" for d in group._device_types))
"""


@installed
@pytest.mark.parametrize(
    ("backend", "serves"),
    [
        ("cpu:sdma", "cpu=sdma"),
        ("cpu:gloo,cuda:sdma", "cpu=gloo cuda=sdma"),
        ("sdma", "cpu=sdma cuda=sdma"),
    ],
)
def test_a_program_that_does_not_import_us_finds_the_backend(backend, serves):
    done = python(INIT.format(backend=backend), PG_SDMA_INNER="cuda=gloo")
    assert done.stdout.strip() == serves, done.stderr


@installed
def test_importing_torch_loads_next_to_nothing_of_ours():
    done = python(
        "import json, sys, torch\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('pg_sdma')]))"
    )
    assert set(json.loads(done.stdout)) == {
        "pg_sdma",
        "pg_sdma._registration",
        "pg_sdma.stats",
        "pg_sdma.trace",
        "pg_sdma_autoload",
    }


@installed
def test_with_autoload_off_the_backend_is_found_where_torch_looks_for_names():
    done = python(INIT.format(backend="cpu:sdma"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if FINDS_BACKENDS_BY_NAME:
        assert done.stdout.strip() == "cpu=sdma", done.stderr
    else:
        assert "Unknown c10d backend type SDMA" in done.stderr


def test_with_autoload_off_an_explicit_import_registers():
    code = "import pg_sdma\n" + INIT.format(backend="cpu:sdma")
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip() == "cpu=sdma", done.stderr


@installed
def test_a_failing_import_of_ours_does_not_take_torch_down():
    done = python("import sys; sys.modules['pg_sdma'] = None\nimport torch\nprint('imported')")
    assert done.stdout.strip() == "imported", done.stderr
    assert "the torch.distributed backend 'sdma' is not available" in done.stderr


def test_autoload_warns_of_a_name_that_is_taken(monkeypatch):
    monkeypatch.delitem(sys.modules, "pg_sdma")
    plugin = dist.Backend._BackendPlugin(lambda: None, False)
    monkeypatch.setitem(dist.Backend._plugins, "SDMA", plugin)
    with pytest.warns(UserWarning, match="already registered, by module test_registration"):
        pg_sdma_autoload.register()


def test_a_name_that_is_taken_is_an_error(monkeypatch):
    plugin = dist.Backend._BackendPlugin(lambda: None, False)
    monkeypatch.setitem(dist.Backend._plugins, "SDMA", plugin)
    with pytest.raises(RuntimeError, match="already registered, by module test_registration"):
        _registration.register()


def test_registering_again_changes_nothing():
    before = dict(dist.Backend._plugins)
    _registration.register()
    assert dist.Backend._plugins == before


def test_both_device_types_are_registered():
    assert dist.Backend.backend_capability["sdma"] == ["cpu", "cuda"]


def test_an_extension_for_another_torch_is_not_loaded(monkeypatch, tmp_path):
    built = tmp_path / "built_for_torch.txt"
    built.write_text("2.12.1+cu128")
    monkeypatch.setattr(_extension, "BUILT_FOR", built)
    with pytest.raises(ImportError) as raised:
        dist.init_process_group("cpu:sdma", store=dist.HashStore(), rank=0, world_size=1)
    assert f"built for torch 2.12.1+cu128, this is torch {torch.__version__}" in str(raised.value)
    assert "pip install --no-build-isolation --force-reinstall --no-deps" in str(raised.value)
    assert not dist.is_initialized()


def test_an_extension_that_was_never_built_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(_extension, "BUILT_FOR", tmp_path / "missing")
    with pytest.raises(ImportError, match="has not been built"):
        _extension.load()


@pytest.mark.parametrize(
    ("built", "running", "same"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0", "2.13.0+rocm7.1", True),
        ("2.13.0", "2.13.1", False),
        ("2.13.0", "2.14.0", False),
        ("2.13.0a0+git1111111", "2.13.0a0+git1111111", True),
        ("2.13.0a0+git1111111", "2.13.0a0+git2222222", False),
        ("2.13.0a0", "2.13.0", False),
    ],
)
def test_same_abi(built, running, same):
    assert _extension.same_abi(built, running) is same


@pytest.mark.parametrize(
    ("prefix", "gpus", "named", "devices"),
    [
        ("cuda/", 0, (), ("cuda",)),
        ("cuda/", 8, (), ("cuda",)),
        ("cpu/", 0, (), ("cpu",)),
        ("cpu/", 8, (), ("cpu", "cuda")),
        ("cpu/", 0, ("cuda",), ("cpu", "cuda")),
        ("cpu/", 0, ("cpu",), ("cpu",)),
    ],
)
def test_the_device_types_are_read_off_the_store(monkeypatch, prefix, gpus, named, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    store = dist.HashStore()
    # A group of another device type may have come before, over the same store.
    for earlier in ("cpu/", "cuda/"):
        creator.device_types(dist.PrefixStore(earlier, store))
    assert creator.device_types(dist.PrefixStore(prefix, store), named) == devices


def options(store=None):
    opts = dist.distributed_c10d._DistributedBackendOptions()
    opts.store = dist.PrefixStore("cpu/", store or dist.HashStore())
    opts.group_rank, opts.group_size, opts.group_id = 0, 1, "pairs"
    opts.timeout = timedelta(seconds=77)
    return opts


def test_the_inner_gloo_is_the_one_that_torch_would_build():
    inner = _inner.build_inner("gloo", "cpu", options(), None)
    assert (inner.name(), inner.rank(), inner.size()) == ("gloo", 0, 1)
    assert inner.options._timeout == timedelta(seconds=77)
    assert inner.options.group_name == "pairs"
    assert inner._get_sequence_number_for_group() == 0


class Options:
    """pg_options that can be copied, as ProcessGroupNCCL.Options can."""

    def __init__(self, timeout=10):
        self.timeout = timeout

    def __copy__(self):
        return Options(self.timeout)


@pytest.fixture
def build_greedy(monkeypatch):
    """Builds, as the inner, a backend that changes what it is given."""

    def create(opts, pg_options):
        opts.store.set("key", "inner")
        opts.group_id = "changed"
        pg_options.timeout = 20
        return opts, pg_options

    plugin = dist.Backend._BackendPlugin(create, True)
    monkeypatch.setitem(dist.Backend._plugins, "GREEDY", plugin)
    return lambda opts, pg_options: _inner.build_inner("greedy", "cpu", opts, pg_options)


def test_what_the_inner_changes_is_its_own(build_greedy):
    opts, pg_options = options(), Options()
    opts.store.set("key", "sdma")
    inner_opts, inner_pg_options = build_greedy(opts, pg_options)
    assert (opts.store.get("key"), inner_opts.store.get("key")) == (b"sdma", b"inner")
    assert (opts.group_id, inner_opts.group_id) == ("pairs", "changed")
    assert (pg_options.timeout, inner_pg_options.timeout) == (10, 20)
    assert inner_opts.timeout == timedelta(seconds=77)


def test_an_inner_of_the_short_interface_is_built(monkeypatch):
    plugin = dist.Backend._BackendPlugin(lambda *arguments: arguments, False)
    monkeypatch.setitem(dist.Backend._plugins, "SHORT", plugin)
    _, rank, size, timeout = _inner.build_inner("short", "cpu", options(), None)
    assert (rank, size, timeout) == (0, 1, timedelta(seconds=77))


def test_an_inner_that_torch_does_not_know_is_refused():
    with pytest.raises(ValueError, match="PG_SDMA_INNER wants 'glue' for cpu"):
        _inner.build_inner("glue", "cpu", options(), None)
