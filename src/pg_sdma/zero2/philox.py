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

Word = Tensor | int
Words = tuple[Word, Word, Word, Word]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The four random words of each counter.

    `counter` is int64 tensors of one shape that hold 32-bit words, lowest first, and integers where
    all counters have the same word; `key` is two 32-bit integers. The result is four tensors of
    that shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = _xor(high1, c1, k0), low1, _xor(high0, c3, k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & MASK, (k1 + _KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _multiply(a: Word, b: int) -> tuple[Word, Word]:
    """The upper and the lower 32 bits of the product of 32-bit words, `b` at least 2**31."""
    # The whole product would overflow int64, which C++ leaves undefined. With 2**32 less for `b` it
    # does not; the lower half is the same, and the upper half is `a` less.
    product = a * (b - 2**32)
    if isinstance(product, int) or isinstance(a, int):
        return (product >> 32) + a, product & MASK
    return (product >> 32).add_(a), product.bitwise_and_(MASK)


def _xor(fresh: Word, word: Word, key: int) -> Word:
    """`fresh` may be overwritten."""
    if isinstance(fresh, int):
        return word ^ (fresh ^ key)
    if isinstance(word, int):
        return fresh.bitwise_xor_(word ^ key)
    return fresh.bitwise_xor_(word).bitwise_xor_(key)
