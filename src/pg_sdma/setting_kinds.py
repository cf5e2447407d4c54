"""How the text of an environment variable becomes a value: the kinds of settings there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INNER_DEFAULTS = {"cpu": "gloo", "cuda": "nccl"}
OPERATIONS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Kind:
    """How the text of a variable becomes a value: `parse` raises ValueError, `allowed` says why."""

    allowed: str
    parse: Callable[[str], Any]


def choice(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    *but_last, last = (f"`{word}`" for word in words)
    return Kind(f"{', '.join(but_last)} or {last}", parse)


def switch(on: str, off: str) -> Kind:
    words = choice(on, off)
    return Kind(words.allowed, lambda text: words.parse(text) == on)


def integer(least: int, unit: str) -> Kind:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return Kind(f"{unit}, an integer from {least}", parse)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of "64", "4K", "16M" or "1G" (powers of two). Raises ValueError for anything else."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not number.isdecimal():
        raise ValueError(f"{text!r} is no size: give bytes, or a number with K, M or G")
    return int(number) * UNITS[unit]


def byte_count(least: int) -> Kind:
    def parse(text: str) -> int:
        value = parse_bytes(text)
        if value < least:
            raise ValueError
        return value

    return Kind(f"bytes from {least}, as `65536`, or with K, M or G as `64K`", parse)


def milliseconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return value


_INJECTION = re.compile(
    r"(?P<point>[a-z-]+)=(?P<action>refuse|die|stop|corrupt|late:\d+(\.\d+)?)(#[1-9]\d*)?(@\d+)?"
)


def injections(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(_INJECTION.fullmatch(part) for part in parts):
        raise ValueError
    return parts


def inner_names(text: str) -> dict[str, str]:
    """Backend name by device type, of those named; a bare name is the accelerator's."""
    inner = {}
    for part in text.split(","):
        device, _, name = part.strip().rpartition("=")
        device = device or "cuda"
        if device not in INNER_DEFAULTS or not re.fullmatch(r"[a-z]\w*", name) or name == "sdma":
            raise ValueError
        inner[device] = name
    return inner


def operation_names(text: str) -> tuple[str, ...]:
    """The operations named, in the order of OPERATIONS."""
    named = {part.strip() for part in text.split(",")}
    if not named <= set(OPERATIONS):
        raise ValueError
    return tuple(operation for operation in OPERATIONS if operation in named)
