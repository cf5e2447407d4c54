"""Arguments at random, most of them bad: no crash, no hang, and the group still gathers rightly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import AllgatherOptions

RANKS = 2
DTYPES = [torch.float32, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.bfloat16]
FORMS = ["single", "list", "coalesced"]

# A tensor as (kind, numbers of its shape, dtype); a call as (form, outputs, inputs).
kinds = st.sampled_from(["dense"] * 12 + ["strided", "meta", "sparse", "undefined", "alias"])
shapes = st.lists(st.integers(0, 6), max_size=3)
dtypes = st.sampled_from(range(len(DTYPES)))
any_tensor = st.tuples(kinds, shapes, dtypes)
any_call = st.tuples(
    st.sampled_from(FORMS),
    st.lists(any_tensor, max_size=4),
    st.lists(any_tensor, max_size=4),
)


@st.composite
def near_call(draw):
    """A call that is right, or nearly: one thing of it may be off."""
    form = draw(st.sampled_from(FORMS))
    count = draw(st.integers(1, 3)) if form == "coalesced" else 1
    inputs = [("dense", [draw(st.integers(0, 9))], draw(dtypes)) for _ in range(count)]
    if form == "list":
        outputs = [inputs[0]] * RANKS
    else:
        outputs = [("dense", [RANKS * shape[0]], dtype) for _, shape, dtype in inputs]
    spoil = draw(st.sampled_from(["nothing", "nothing", "output", "input", "fewer", "more"]))
    if spoil == "output":
        outputs = [draw(any_tensor), *outputs[1:]]
    elif spoil == "input":
        inputs = [draw(any_tensor), *inputs[1:]]
    elif spoil == "fewer":
        outputs = outputs[1:]
    elif spoil == "more":
        outputs = [*outputs, draw(any_tensor)]
    return form, outputs, inputs


def tensor(kind, shape, dtype, value):
    dtype = DTYPES[dtype]
    if kind == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    dense = torch.full(shape, value, dtype=dtype)
    if kind == "sparse":
        return dense.to_sparse()
    if kind == "strided":
        return torch.stack([dense, dense], -1)[..., 0]
    if kind == "undefined":
        return None
    if kind == "alias":
        return torch.zeros(1, dtype=dtype).expand(shape) if 0 not in shape else dense
    return dense


def make(form, outputs, inputs, async_op):
    """The call's Work; raises what the call raises."""
    rank = dist.get_rank()
    outputs = [tensor(*what, 0) for what in outputs]
    inputs = [tensor(*what, rank + 1) for what in inputs]
    options = AllgatherOptions()
    options.asyncOp = async_op
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    if form == "list":
        return group.allgather([outputs], inputs, options)
    if form == "coalesced":  # which a Backend has not in Python
        return dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs, options)
    if len(outputs) != 1 or len(inputs) != 1:
        raise TypeError("the fuzzer's: one tensor each")
    return group._allgather_base(outputs[0], inputs[0], options)


def outcome(calls, async_op):
    """What this rank's call did: None, or the exception's type and text."""
    try:
        work = make(*calls[dist.get_rank()], async_op)
        if work is not None:
            work.wait()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def right():
    output = torch.full((RANKS,), -1.0)
    dist.all_gather_into_tensor(output, torch.tensor([float(dist.get_rank())]))
    return output.tolist() == [0.0, 1.0]


def reaches_the_backend(call):
    """Whether Python's bindings and torch's dispatcher take the call, on their own one rank."""
    form, outputs, inputs = call
    kinds = {kind for kind, _, _ in [*outputs, *inputs]}
    if form == "coalesced" and (not outputs or not inputs or kinds & {"sparse", "meta"}):
        return False
    try:  # not every dtype has every layout
        for what in [*outputs, *inputs]:
            tensor(*what, 1)
    except Exception:
        return False
    if any(kind == "undefined" for kind, _, _ in [*outputs, *inputs]):
        return False
    if inputs and inputs[0][0] == "meta":  # which no group serves: torch.distributed refuses it
        return False
    return form != "single" or (len(outputs), len(inputs)) == (1, 1)


def one_inner_call(call):
    """Several inputs in the list form are the inner's alone: both ranks must make them alike."""
    return call[0] == "list" and len(call[2]) != 1


def try_all(batch):
    return [(outcome(calls, async_op), right()) for calls, async_op in batch]


calls = st.tuples(st.one_of(near_call(), any_call), st.one_of(near_call(), any_call))


def check(pool, batch):
    batch = [
        ((a, b), async_op)
        for (a, b), async_op in batch
        if reaches_the_backend(a) and reaches_the_backend(b)
        if not one_inner_call(a) and not one_inner_call(b)
    ]
    results = pool.run(try_all, batch, timeout=60)
    for (both, _), mine, peers in zip(batch, *results, strict=True):
        assert mine[1] and peers[1], both  # the group is as usable as before
        # A call that one rank cannot make fails on both.
        assert (mine[0] is None) == (peers[0] is None), (both, mine, peers)
        for failure in (mine[0], peers[0]):
            assert failure is None or failure[0] in ("RuntimeError", "ValueError"), failure


def fuzz(ranks, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        # A failure leaves the group out of step, so that a smaller one would be another's.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(calls, st.booleans()), min_size=5, max_size=10))
    def run(batch):
        check(ranks(RANKS), batch)

    run()


def test_bad_arguments_at_random(ranks):
    fuzz(ranks, 12)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_bad_arguments_at_random_for_long(ranks):
    fuzz(ranks, 1000)
