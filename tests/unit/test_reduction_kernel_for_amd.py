"""What Triton compiles of the kernel that sums slices for AMD's GPUs, read and not run.

No AMD GPU was there. What the launch and the rounding rely on is read off the code object's
metadata, its instructions, and what LLVM was given; and the way to the driver's handle goes to a
stand-in for Triton's driver. From the handle on, tests/standin/test_standin.py has the launches.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pg_sdma import kernels

pytestmark = pytest.mark.nightly

DTYPES = ("Half", "BFloat16", "Float", "Double")
WORLDS = (2, 3, 8)
SUM, AVERAGE, PREMULTIPLIED = 0, 1, 2
EIGHT_BYTES = "8"


class Code:
    """One compiled kernel."""

    def __init__(self, arch: str, dtype: str, world: int, kind: int, aligned: bool) -> None:
        from triton.backends.compiler import GPUTarget

        from pg_sdma import reduction_kernel

        self.world, self.kind, self.aligned = world, kind, aligned
        compiled = reduction_kernel.compile_for(
            GPUTarget("hip", arch, 64), kernels._DTYPES[dtype], world, 1, kind, aligned
        )
        self.metadata = compiled.metadata
        self.text: str = compiled.asm["amdgcn"]
        # Of LLVM's IR, the kernel's parameters and its body.
        kernel = re.search(r"^define .*@_sum_slices.*$\n((?s:.*?))^}", compiled.asm["llir"], re.M)
        assert kernel is not None
        self.parameters, self.given = kernel[0].splitlines()[0], kernel[1]

    def number(self, name: str) -> int:
        found = re.search(rf"\.{name}:? +(\d+)", self.text)
        assert found is not None, name
        return int(found[1])

    def divides(self) -> bool:
        """The number of ranks is no power of two: dividing by it is no multiplication."""
        return self.kind == AVERAGE and self.world == 3


@pytest.fixture(scope="module", params=itertools.product(("gfx942", "gfx950"), DTYPES), ids=str)
def codes(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, list[Code]]]:
    pytest.importorskip("triton", minversion="3.5")  # before, it had no linker of its own
    arch, dtype = request.param
    cases = itertools.product(WORLDS, (SUM, AVERAGE, PREMULTIPLIED), (True, False))
    yield arch, dtype, [Code(arch, dtype, *case) for case in cases]


Codes = tuple[str, str, list[Code]]


def test_the_launch_fills_every_argument_in_its_order(codes: Codes) -> None:
    """Six, and one or two of Triton's own, which nothing reads: Launch in engine.h has eight."""
    for code in codes[2]:
        listed = re.findall(r"\.offset: +(\d+)\s+\.size: +(\d+)\s+\.value_kind: +(\w+)", code.text)
        # The runtime itself fills in those that are hidden.
        passed = [argument for argument in listed if not argument[2].startswith("hidden")]
        assert 7 <= len(passed) <= 8, passed
        kinds = ["global_buffer"] * 3 + ["by_value"] * 3 + ["global_buffer"] * 2
        wanted = [(str(8 * i), EIGHT_BYTES, kind) for i, kind in enumerate(kinds)]
        assert passed == wanted[: len(passed)]
        unread = re.findall(r"readnone [^,]*%([67])\b", code.parameters)
        assert len(unread) == len(passed) - 6, code.parameters
        for scratch in ("global_scratch_size", "profile_scratch_size"):
            assert getattr(code.metadata, scratch, 0) == 0


def test_the_launch_has_the_threads_and_the_shared_memory(codes: Codes) -> None:
    from pg_sdma import reduction_kernel

    for code in codes[2]:
        assert code.number("wavefront_size") == 64
        assert 64 * code.metadata.num_warps == reduction_kernel.THREADS
        assert code.number("max_flat_workgroup_size") == reduction_kernel.THREADS
        assert code.number("group_segment_fixed_size") == 0  # all of it is the launch's to give
        assert code.metadata.shared <= 64 << 10


def test_nothing_is_spilled(codes: Codes) -> None:
    arch, dtype, all_codes = codes
    registers = [code.number("vgpr_count") for code in all_codes]
    print(f"{arch} {dtype}: {min(registers)} to {max(registers)} VGPRs")
    for code in all_codes:
        assert code.number("private_segment_fixed_size") == 0
        assert code.number("vgpr_spill_count") == 0
        assert code.number("sgpr_spill_count") == 0


def test_each_operation_rounds_to_nearest_by_itself(codes: Codes) -> None:
    for code in codes[2]:
        for mode in ("round_mode_32", "round_mode_16_64"):
            assert code.number(f"amdhsa_float_{mode}") == 0  # to nearest, ties to even
        for mode in ("denorm_mode_32", "denorm_mode_16_64"):
            assert code.number(f"amdhsa_float_{mode}") == 3  # none is flushed
        assert "s_setreg" not in code.text, "it changes its modes"
        # LLVM is given operations that it must not replace by faster or by fused ones.
        operations = re.findall(r"= (f(?:add|sub|mul|div|ptrunc|pext)) (\S+)", code.given)
        types = {word.lstrip("<0123456789") for _, word in operations} - {""}
        assert types <= {"half", "bfloat", "float", "double"}, types
        assert "fpmath" not in code.given and "llvm.fma" not in code.given
        # An addition may be a * 1 + b, which is as exact; nothing else is fused, but for the steps
        # of a division, which ends in a correction.
        additions = re.compile(r"v_fma_mix_f32 v\d+, [^,]+, 1\.0, ")
        text = additions.sub("", code.text)
        odd = re.findall(r"\bv_\w*(?:_mix|mad|mac_legacy|_rtz|_dot)\w*", text)
        assert not odd, odd
        fused = re.findall(r"\bv_(?:pk_)?(?:fma|mac|rcp|rsq)\w+", text)
        corrections = re.findall(r"\bv_div_fixup\w+", text)
        assert bool(fused) == bool(corrections) == code.divides(), (set(fused), corrections)


@pytest.mark.parametrize("kind", [SUM, AVERAGE, PREMULTIPLIED])
def test_bf16_is_rounded_to_nearest(kind: int) -> None:
    pytest.importorskip("triton", minversion="3.5")
    assert "v_cvt_pk_bf16_f32" in Code("gfx950", "BFloat16", 3, kind, True).text
    # gfx942 has no such instruction: 0x7fff and the last bit that stays are added, and NaN is kept.
    text = Code("gfx942", "BFloat16", 3, kind, True).text
    assert re.search(r"v_bfe_u32 v\d+, v\d+, 16, 1", text)
    assert re.search(r"v_add3_u32 v\d+, v\d+, v\d+, s\d+", text)
    assert re.search(r"s_movk_i32 s\d+, 0x7fff", text)
    assert re.search(r"v_cmp_[ou]_f32", text)


def test_addresses_have_64_bits_and_accesses_are_wide(codes: Codes) -> None:
    """Buffer instructions have 32, which Triton takes for enough where it thinks tensors small."""
    for code in codes[2]:
        assert not re.search(r"\bbuffer_(load|store)", code.text)
        assert "global_load_dwordx4" in code.text
        assert not code.aligned or "global_store_dwordx4" in code.text


class Driver:
    """What Triton asks of its driver on ROCm, to load a kernel."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int, int]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        pass

    def get_current_device(self) -> int:
        return 3

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx942", 64)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 64 << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.loaded.append((name, binary[:4], shared, device))
        return 1, 0xABCDEF0123456, 77, 0, 256


def test_on_rocm_the_handle_of_what_triton_loads_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", minversion="3.5")
    from triton.runtime import driver

    from pg_sdma import reduction_kernel

    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    triton_driver = Driver()
    before = dict(vars(driver))
    driver.set_active(triton_driver)
    try:
        assert kernels.why_none() == ""
        found = kernels.compile_for(3, "BFloat16", 2, 0, SUM, aligned=False)
    finally:
        vars(driver).update(before)
        reduction_kernel.compile_kernel.cache_clear()
    [(name, magic, shared, device)] = triton_driver.loaded
    assert (name, magic, device) == ("_sum_slices", b"\x7fELF", 3)
    assert shared > 0
    assert found == (0xABCDEF0123456, 256, shared, reduction_kernel.BLOCKS, 77)
