"""The static rule: which calls go to the inner unnumbered, for what every rank passes alike."""

from __future__ import annotations

import pytest

from pg_sdma._C import _static_refusal

GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        ({"output_bytes": GIB}, ""),
        ({"output_bytes": 0}, ""),
        ({"output_bytes": GIB, "why_no_transport": "the vote said no"}, "the vote said no"),
        ({"output_bytes": GIB, "unsupported": "reduce operation MAX"}, "reduce operation MAX"),
        ({"output_bytes": GIB, "sums": True}, ""),
        ({"output_bytes": GIB, "sums": True, "why_no_sums": "no Triton"}, "no Triton"),
        ({"output_bytes": GIB, "why_no_sums": "no Triton"}, ""),
        ({"output_bytes": GIB, "capturing": True}, "graph capture"),
        ({"output_bytes": GIB, "coalescing": True}, "inside a coalescing block"),
        ({"output_bytes": GIB, "even": False}, "uneven shards"),
        ({"output_bytes": 1023, "min_bytes": 1024}, "below PG_SDMA_MIN_BYTES"),
        ({"output_bytes": 1023, "min_sum_bytes": 1024}, ""),
        ({"output_bytes": 1023, "sums": True, "min_sum_bytes": 1024}, "below PG_SDMA_MIN_BYTES"),
        ({"output_bytes": 1023, "sums": True, "min_bytes": 1024}, ""),
        ({"output_bytes": 1024, "min_bytes": 1024}, ""),
        ({"output_bytes": GIB, "tensors": 40, "min_bytes": GIB}, ""),
        # The mean decides for coalesced calls alone.
        ({"output_bytes": 1000, "tensors": 10, "min_mean_bytes": 101}, "many small tensors"),
        ({"output_bytes": 1000, "tensors": 10, "min_mean_bytes": 100}, ""),
        ({"output_bytes": 1, "tensors": 1, "min_mean_bytes": 100}, ""),
    ],
)
def test_refusal(facts, refusal):
    assert _static_refusal(**facts) == refusal


def test_a_group_without_a_transport_refuses_everything_for_that_reason():
    everything = {"capturing": True, "coalescing": True, "even": False, "min_bytes": GIB}
    assert _static_refusal(output_bytes=1, why_no_transport="off", **everything) == "off"


@pytest.mark.parametrize("own", ["address", "stream", "input"])
def test_what_may_differ_between_ranks_is_no_fact(own):
    """The route would differ with it."""
    with pytest.raises(TypeError):
        _static_refusal(output_bytes=1, **{own: 0})
