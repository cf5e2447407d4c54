"""The random numbers of ZeRO-2, and what rounding with them does to sums."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from pg_sdma.zero2.philox import philox
from pg_sdma.zero2.rounding import BF16_NAN, COUNTERS, TILE, Key, accumulate, draws, round_to_bf16

# Published with Random123 (kat_vectors, philox4x32 of 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

MANY = 10_000_000
SIGMAS = 6  # of a right generator one test in 10^9 exceeds them


def random_key() -> Key:
    return Key(secrets.randbits(64), *(secrets.randbits(32) for _ in range(3)))


def deviation(counts: Tensor) -> float:
    """By how many standard deviations the chi-square of `counts`, expected to be even, is large."""
    expected = counts.sum().item() / counts.numel()
    freedom = counts.numel() - 1
    chi_square = ((counts - expected).double().square() / expected).sum().item()
    return (chi_square - freedom) / (2 * freedom) ** 0.5


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox((c0, c1, c2, c3), key)) == expected


def test_draws_are_even_and_independent() -> None:
    draw = draws(random_key(), first=12_345, count=MANY)
    assert draw.min() >= 0
    assert draw.max() <= 65535
    assert abs(draw.double().mean().item() - 32767.5) < SIGMAS * 65536 / (12 * MANY) ** 0.5
    assert deviation(torch.bincount(draw, minlength=65536)) < SIGMAS
    # Pairs of elements: neighbours, all pairs of one Philox call, those of the next tile.
    for distance in (1, *range(COUNTERS, TILE + 1, COUNTERS)):
        for shift in (0, 12):
            bits = draw[:2_000_000] >> shift & 15
            pairs = bits[:-distance] * 16 + bits[distance:]
            assert deviation(torch.bincount(pairs, minlength=256)) < SIGMAS, (distance, shift)


@pytest.mark.parametrize("field", ["seed", "step", "micro_step", "tensor"])
def test_keys_that_differ_give_independent_draws(field: str) -> None:
    key = random_key()
    other = Key(**{**vars(key), field: getattr(key, field) ^ 1})
    high = [draws(k, 0, 1_000_000) >> 12 for k in (key, other)]
    assert deviation(torch.bincount(high[0] * 16 + high[1], minlength=256)) < SIGMAS


def test_both_halves_of_the_seed_count() -> None:
    low, high = (draws(Key(seed, 1, 2, 3), 0, 8) for seed in (5, 5 + 2**32))
    assert not torch.equal(low, high)


def test_an_elements_draw_does_not_depend_on_the_shard_it_is_in() -> None:
    key = random_key()
    whole = draws(key, 0, 5 * TILE)
    for first, count in ((0, 1), (1, 7), (TILE - 3, 10), (4097, 2 * TILE), (5 * TILE - 1, 1)):
        assert torch.equal(draws(key, first, count), whole[first : first + count])


def test_rounding_is_unbiased_and_independent_for_each_element() -> None:
    x = torch.randn(MANY)
    rounded = round_to_bf16(x, draws(random_key(), 0, MANY)).float()
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    unit = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32) - below
    place = ((x - below) / unit).double()  # between the neighbours, 0 to 1
    up = ((rounded - below) / unit).double()
    assert ((up == 0) | (up == 1)).all()
    error = up - place
    variance = place * (1 - place)
    assert abs(error.sum().item()) < SIGMAS * variance.sum().sqrt().item()
    for part in range(8):  # wherever between the neighbours the value lies
        here = (place * 8).int() == part
        assert abs(error[here].sum().item()) < SIGMAS * variance[here].sum().sqrt().item()
    # Were one draw shared by neighbours, sums of 8 would vary by up to 8 times as much.
    groups = error.view(-1, 8).sum(1).square().sum() / variance.sum()
    assert groups.item() == pytest.approx(1, abs=0.01)


def test_what_is_no_number_or_exact_stays_what_it_is() -> None:
    nan = [0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, -0x7FFFFF]  # payloads, in all places
    special = torch.tensor(nan, dtype=torch.int32).view(torch.float32)
    for draw in (0, 1, 32768, 65535):
        full = torch.full((5,), draw, dtype=torch.int32)
        assert round_to_bf16(special, full).view(torch.int16).tolist() == [BF16_NAN] * 5
        exact = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, -1.5])
        assert same_bits(round_to_bf16(exact, full), exact.bfloat16())


@pytest.mark.parametrize("shard_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_and_zeroed(shard_dtype: torch.dtype, dtype: torch.dtype) -> None:
    key = random_key()
    first, size, numel = 777, 70 * TILE + 5, 71 * TILE  # more than what is in work at a time
    gradient = torch.randn(numel).to(dtype)
    shard = torch.randn(size).to(shard_dtype)
    expected = gradient[first : first + size].float() * (1 / 3)
    for overwrite in (False, True):
        left, added = gradient.clone(), shard.clone()
        if overwrite:
            added.fill_(torch.nan)
        total = expected if overwrite else expected + shard
        if shard_dtype == torch.bfloat16:
            total = round_to_bf16(total, draws(key, first, size))
        accumulate(added, left, first, 1 / 3, overwrite, key)
        assert same_bits(added, total)
        assert not left.any()


def rounding_script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "zero2_rounding.py"
    spec = importlib.util.spec_from_file_location("zero2_rounding", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that spin for each other take minutes where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_long_sum_has_no_bias_but_with_rounding_to_nearest(tmp_path: Path) -> None:
    script = rounding_script()
    bias = script.measure(secrets.randbits(32))
    assert len(bias.nearest) == 1024
    assert abs(bias.stochastic[-1]) < 0.001
    assert bias.nearest[-1] < -0.1
    script.draw(bias, tmp_path / "rounding.png")
    assert (tmp_path / "rounding.png").read_bytes().startswith(b"\x89PNG")
