"""Every virtual of the installed torch's c10d.Backend is overridden, or has a reason not to be.

One that is not would raise "does not support ..." for an operation that the inner has, or answer in
the inner's place.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

BACKEND_HPP = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"
DELEGATING_H = Path(__file__).parents[2] / "csrc/backend/delegating.h"

NOT_OVERRIDDEN = {
    "clone": "belongs to Options, which are the inner's",
    "getBoundDeviceId": "answers from what setBoundDeviceId stores here and in the inners",
    "supportsReconfigure": "false: a transport is bound to the ranks that it was made with",
    "get_reconfigure_handle": "see supportsReconfigure",
    "reconfigure": "see supportsReconfigure",
}


def names(pattern: str, header: Path) -> set[str]:
    text = re.sub(r"//[^\n]*|^#[^\n]*", "", header.read_text(), flags=re.MULTILINE)
    return set(re.findall(pattern, text))


def virtuals() -> set[str]:
    return names(r"\bvirtual\s[^;{}(]*?(\w+)\s*\(", BACKEND_HPP)


def overridden() -> set[str]:
    return names(r"(\w+)\s*\([^;{}]*\)\s*(?:const\s+)?(?:override|final)\b", DELEGATING_H)


def test_every_virtual_is_overridden_or_has_a_reason():
    missing = virtuals() - overridden() - NOT_OVERRIDDEN.keys()
    assert not missing, f"delegating.h lacks virtuals of torch {torch.__version__}"


def test_no_reason_outlives_its_use():
    assert not NOT_OVERRIDDEN.keys() & overridden()


def test_the_parser_sees_the_header():
    expected = {"allreduce", "_allgather_base", "split", "shutdown", "getBackendName"}
    assert expected <= virtuals() and len(virtuals()) >= 45
