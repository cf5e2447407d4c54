"""The static rule: which calls go to the inner unnumbered, for what every rank passes alike."""

from __future__ import annotations

import pytest

from pg_sdma._C import _static_refusal
from pg_sdma.tuning import LARGEST

GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        ({"total_bytes": GIB}, ""),
        ({"total_bytes": 0}, ""),
        ({"total_bytes": GIB, "why_no_transport": "the vote said no"}, "the vote said no"),
        ({"total_bytes": GIB, "unsupported": "reduce operation MAX"}, "reduce operation MAX"),
        ({"total_bytes": GIB, "sums": True}, ""),
        ({"total_bytes": GIB, "sums": True, "why_no_sums": "no Triton"}, "no Triton"),
        ({"total_bytes": GIB, "why_no_sums": "no Triton"}, ""),
        ({"total_bytes": GIB, "capturing": True}, "graph capture"),
        ({"total_bytes": GIB, "coalescing": True}, "inside a coalescing block"),
        ({"total_bytes": GIB, "even": False}, "uneven shards"),
        ({"total_bytes": 1023, "min_bytes": 1024}, "below 1024 bytes (PG_SDMA_MIN_BYTES)"),
        (
            {"total_bytes": GIB, "min_bytes": LARGEST},
            "the tuning file leaves it to the inner at every size",
        ),
        ({"total_bytes": 1023, "min_sum_bytes": 1024}, ""),
        (
            {"total_bytes": 1023, "sums": True, "min_sum_bytes": 1024},
            "below 1024 bytes (PG_SDMA_MIN_BYTES)",
        ),
        ({"total_bytes": 1023, "sums": True, "min_bytes": 1024}, ""),
        ({"total_bytes": 1024, "min_bytes": 1024}, ""),
        ({"total_bytes": GIB, "tensors": 40, "min_bytes": GIB}, ""),
        # The mean decides for coalesced calls alone.
        (
            {"total_bytes": 1000, "tensors": 10, "min_mean_bytes": 101},
            "the mean of its tensors is below 101 bytes (PG_SDMA_MIN_BYTES)",
        ),
        ({"total_bytes": 1000, "tensors": 10, "min_mean_bytes": 100}, ""),
        ({"total_bytes": 1, "tensors": 1, "min_mean_bytes": 100}, ""),
    ],
)
def test_refusal(facts, refusal):
    assert _static_refusal(**facts) == refusal


def test_a_group_without_a_transport_refuses_everything_for_that_reason():
    everything = {"capturing": True, "coalescing": True, "even": False, "min_bytes": GIB}
    assert _static_refusal(total_bytes=1, why_no_transport="off", **everything) == "off"


@pytest.mark.parametrize("own", ["address", "stream", "input"])
def test_what_may_differ_between_ranks_is_no_fact(own):
    """The route would differ with it."""
    with pytest.raises(TypeError):
        _static_refusal(total_bytes=1, **{own: 0})
