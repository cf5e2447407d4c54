"""What is counted of a group's operations, and the share of it that went direct."""

from __future__ import annotations

from pg_sdma.stats import direct_share


def test_the_share_is_of_bytes_and_not_of_calls() -> None:
    counts = {
        "all_gather_into_tensor": {
            "direct": {"calls": 1, "bytes": 300},
            "inner: late": {"calls": 9, "bytes": 100},
        }
    }
    assert direct_share(counts) == 0.75
