"""Philox 4x32-10, a random number generator without state, in integer operations of ATen.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Equal in every
bit to Random123's `philox4x32_10` and to Triton's `tl.philox`, on any device.
"""

from __future__ import annotations

from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The four random words of each counter.

    `counter` is four int64 tensors of one shape that hold 32-bit words, lowest first; `key` is two
    32-bit integers. The result has the counter's form.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1.bitwise_xor_(c1 ^ k0), low1, high0.bitwise_xor_(c3 ^ k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & MASK, (k1 + _KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of the product of 32-bit words."""
    # In halves: the whole product would overflow int64, which C++ leaves undefined.
    below = (a & 0xFFFF) * b
    above = (a >> 16).mul_(b).add_(below >> 16)
    low = ((above & 0xFFFF) << 16).bitwise_or_(below & 0xFFFF)
    return above >> 16, low
