"""Bad arguments and contradicting calls raise on every rank and leave the group usable.

Also arguments that look bad and are not: what gloo gathers on CPU, this gathers alike.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import init_group
from torch.distributed.distributed_c10d import AllgatherOptions

RANKS = 3


def raised(call, async_op):
    """(when, type, message) of what `call(async_op)` raised: at the "call" or at "wait()"."""
    try:
        work = call(async_op)
    except Exception as error:
        return "call", type(error).__name__, str(error)
    try:
        if work is not None:
            work.wait()
    except Exception as error:
        return "wait()", type(error).__name__, str(error)
    return None


def gather_right():
    """A gather on the same group, to see that it works."""
    output = torch.empty(RANKS)
    dist.all_gather_into_tensor(output, torch.tensor([float(dist.get_rank())]))
    return output.tolist() == [0, 1, 2]


def check_all_raised(results, async_op):
    for result, usable in results:
        assert result is not None, "did not raise"
        when, kind, _ = result
        assert (when, kind) == ("wait()" if async_op else "call", "RuntimeError"), result
        assert usable
    return [message for (_, _, message), _ in results]


# -- one rank's arguments are bad


def options(async_op):
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


def single(output, input, async_op):
    return dist.all_gather_into_tensor(output, input, async_op=async_op)


def as_list(outputs, input, async_op):
    # Not dist.all_gather, which checks some of this itself, on the one rank.
    return dist.group.WORLD.allgather([outputs], [input], options(async_op))


def coalesced(outputs, inputs, async_op):
    return dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs, options(async_op))


def floats(*sizes):
    return [torch.empty(size) for size in sizes]


# Each: operation, what the bad rank passes, what the others pass, what the message has to say.
BAD = {
    "output too small": (
        single,
        lambda: (torch.empty(11), torch.ones(4)),
        lambda: (torch.empty(12), torch.ones(4)),
        "all_gather_into_tensor: expected an output of 12 elements",
    ),
    "output too large": (
        single,
        lambda: (torch.empty(13), torch.ones(4)),
        lambda: (torch.empty(12), torch.ones(4)),
        "got a Float tensor of shape [13]",
    ),
    "output of another dtype": (
        single,
        lambda: (torch.empty(12, dtype=torch.int32), torch.ones(4)),
        lambda: (torch.empty(12), torch.ones(4)),
        "all_gather_into_tensor: expected one dtype, got a Int tensor",
    ),
    "more memory than there is": (
        single,
        lambda: (torch.empty(1).expand(3 << 50), torch.ones(1).expand(1 << 50)),
        lambda: (torch.empty(12), torch.ones(4)),
        "allocate",
    ),
    "empty list": (
        as_list,
        lambda: ([], torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "all_gather: expected a list of 3 output tensors, one a rank, got 0",
    ),
    "list too long": (
        as_list,
        lambda: (floats(4, 4, 4, 4), torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "one a rank, got 4",
    ),
    "uneven list": (
        as_list,
        lambda: (floats(4, 5, 4), torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "expected an output at index 1 of 4 elements",
    ),
    "list of several dtypes": (
        as_list,
        lambda: ([*floats(4, 4), torch.empty(4, dtype=torch.bool)], torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "got a Bool tensor of shape [4] as output at index 2",
    ),
    "output on another device": (
        as_list,
        lambda: ([*floats(4, 4), torch.empty(4, device="meta")], torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "all_gather: expected all tensors on cpu, an output is on meta",
    ),
    "sparse output": (
        as_list,
        lambda: ([*floats(4, 4), torch.ones(4).to_sparse()], torch.ones(4)),
        lambda: (floats(4, 4, 4), torch.ones(4)),
        "all_gather: expected dense tensors, an output is not",
    ),
    "fewer outputs than inputs": (
        coalesced,
        lambda: (floats(12), floats(4, 4)),
        lambda: (floats(12, 12), floats(4, 4)),
        "all_gather_into_tensor_coalesced: expected as many outputs as inputs, got 1 outputs",
    ),
    "one output of many too small": (
        coalesced,
        lambda: (floats(*[12] * 70, 11), floats(*[4] * 71)),
        lambda: (floats(*[12] * 71), floats(*[4] * 71)),
        "expected an output at index 70 of 12 elements",
    ),
}


def call_badly(name, bad_rank, async_op):
    operation, bad, good, _ = BAD[name]
    arguments = bad() if dist.get_rank() == bad_rank else good()
    return raised(lambda async_op: operation(*arguments, async_op), async_op), gather_right()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("name", BAD)
def test_one_ranks_bad_arguments_raise_everywhere(ranks, name, bad_rank, async_op):
    results = ranks(RANKS).run(call_badly, name, bad_rank, async_op)
    for message in check_all_raised(results, async_op):
        assert f"Bad arguments on rank {bad_rank}: all_gather" in message
        assert BAD[name][3] in message


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_bad_arguments_are_all_told(ranks, name):
    def told(message):
        return [rank for rank in range(RANKS) if f"Bad arguments on rank {rank}: " in message]

    results = ranks(RANKS).run(call_badly_everywhere, name)
    for message in check_all_raised(results, False):
        assert told(message) == [0, 1, 2]
        assert message.endswith("No rank has started; correct the arguments on every rank.")


def call_badly_everywhere(name):
    return call_badly(name, dist.get_rank(), False)


# -- good arguments that contradict a peer's


def tensors(dtypes, *sizes):
    inputs = [torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    outputs = [torch.empty(RANKS * i.numel(), dtype=i.dtype) for i in inputs]
    return outputs, inputs


def one(size, dtype=torch.float32):
    return lambda async_op: single(
        torch.empty(RANKS * size, dtype=dtype), torch.ones(size, dtype=dtype), async_op
    )


def listed(size):
    return lambda async_op: as_list(floats(*[size] * RANKS), torch.ones(size), async_op)


def many(*sizes, dtypes=None):
    outputs, inputs = tensors(dtypes or [torch.float32] * len(sizes), *sizes)
    return lambda async_op: coalesced(outputs, inputs, async_op)


F32, I32 = torch.float32, torch.int32

# Each: rank 1's call and how messages name it, then the other ranks'.
MISMATCHES = {
    "single and list": (
        lambda: (listed(4), "all_gather of 1 Float tensor, 48 bytes"),
        lambda: (one(4), "all_gather_into_tensor of 1 Float tensor, 48 bytes"),
    ),
    "single and coalesced": (
        lambda: (many(4), "all_gather_into_tensor_coalesced of 1 Float tensor"),
        lambda: (one(4), "all_gather_into_tensor of 1 Float tensor"),
    ),
    "list and coalesced": (
        lambda: (many(4), "all_gather_into_tensor_coalesced of 1 Float tensor"),
        lambda: (listed(4), "all_gather of 1 Float tensor"),
    ),
    "size": (lambda: (one(5), "60 bytes"), lambda: (one(4), "48 bytes")),
    "size in a list": (lambda: (listed(5), "60 bytes"), lambda: (listed(4), "48 bytes")),
    "nothing and something": (lambda: (one(0), "0 bytes"), lambda: (one(4), "48 bytes")),
    "dtype of the same width": (
        lambda: (one(4, I32), "1 Int tensor, 48 bytes"),
        lambda: (one(4), "1 Float tensor, 48 bytes"),
    ),
    "dtype of another width": (
        lambda: (one(4, torch.float64), "1 Double tensor, 96 bytes"),
        lambda: (one(4), "1 Float tensor, 48 bytes"),
    ),
    "dtype and size, of the same bytes": (
        lambda: (one(16, torch.bool), "1 Bool tensor, 48 bytes"),
        lambda: (one(4), "1 Float tensor, 48 bytes"),
    ),
    "number of tensors": (
        lambda: (many(4, 4, 4), "3 Float tensors, 144 bytes"),
        lambda: (many(6, 6), "2 Float tensors, 144 bytes"),
    ),
    "split of the same bytes": (
        lambda: (many(4, 8), "2 Float tensors, 144 bytes"),
        lambda: (many(8, 4), "2 Float tensors, 144 bytes"),
    ),
    "dtype of one of many": (
        lambda: (many(4, 4, dtypes=[F32, I32]), "2 Float+Int tensors"),
        lambda: (many(4, 4), "2 Float tensors"),
    ),
    "more tensors than one operation carries": (
        lambda: (many(*[4] * 70), "70 Float tensors"),
        lambda: (many(*[4] * 64), "64 Float tensors"),
    ),
    "size behind what one operation carries": (
        lambda: (many(*[4] * 69, 5), "70 Float tensors, 3372 bytes"),
        lambda: (many(*[4] * 70), "70 Float tensors, 3360 bytes"),
    ),
}


def mismatch(name, async_op):
    call, _ = MISMATCHES[name][0 if dist.get_rank() == 1 else 1]()
    return raised(call, async_op), gather_right()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_contradicting_calls_raise_everywhere_and_are_all_named(ranks, name, async_op):
    results = ranks(RANKS).run(mismatch, name, async_op)
    of_rank_1, of_others = (calls()[1] for calls in MISMATCHES[name])
    for rank, message in enumerate(check_all_raised(results, async_op)):
        assert message.startswith(f"rank {rank}: operation ")
        for peer, named in enumerate([of_others, of_rank_1, of_others]):
            told = next(s for s in message.split(". ") if s.startswith(f"Rank {peer}: "))
            assert named in told


# -- a closed group


def use_destroyed_group():
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    output, input = torch.empty(RANKS), torch.ones(1)
    dist.all_gather_into_tensor(output, input, group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return raised(lambda _: backend._allgather_base(output, input), False), gather_right()


def test_a_destroyed_group_raises(ranks):
    for (_, kind, message), usable in ranks(RANKS).run(use_destroyed_group):
        assert kind == "DistBackendError"
        assert "all_gather_into_tensor: group" in message and "has been destroyed" in message
        assert usable


# -- arguments that are good


def expected_shards(*shape):
    return [torch.arange(24.0).view(*shape) + 100 * r for r in range(RANKS)]


def strided(*shape):
    """Every other column of twice as many: dense, but not contiguous."""
    return torch.full((*shape[:-1], 2 * shape[-1]), -1.0)[..., ::2]


def transposed(*shape):
    return torch.full(shape[::-1], -1.0).t()


def gather_layouts(async_op):
    rank = dist.get_rank()
    shards = expected_shards(4, 6)
    whole = torch.cat(shards)
    got = {}

    def gather(name, operation, outputs, inputs):
        work = operation(outputs, inputs, async_op)
        if work is not None:
            work.wait()
        got[name] = [output.clone() for output in outputs]

    def single_of_lists(outputs, inputs, async_op):
        return single(outputs[0], inputs[0], async_op)

    def list_of_lists(outputs, inputs, async_op):
        return as_list(outputs, inputs[0], async_op)

    for name, layout in {"strided": strided, "transposed": transposed}.items():
        inputs = [layout(4, 6).copy_(shards[rank]), shards[rank].clone()]
        gather(name, single_of_lists, [layout(12, 6)], inputs)
        gather(f"{name}, list", list_of_lists, [layout(4, 6) for _ in range(RANKS)], inputs)
        gather(f"{name}, coalesced", coalesced, [layout(12, 6), torch.empty(12, 6)], inputs)
    return got, whole, shards


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_that_are_not_contiguous(ranks, async_op):
    for got, whole, shards in ranks(RANKS).run(gather_layouts, async_op):
        assert len(got) == 6
        for name, outputs in got.items():
            expected = shards if "list" in name else [whole] * len(outputs)
            for output, right in zip(outputs, expected, strict=True):
                assert torch.equal(output, right), name


def gather_from_the_place_of_a_peer():
    rank = dist.get_rank()
    got = []
    for place in range(RANKS):
        # Large, so that peers are still reading when this rank writes there.
        output = torch.full((RANKS, 1 << 20), -1.0)
        input = output[(rank + place) % RANKS].fill_(rank)
        dist.all_gather_into_tensor(output, input)
        got.append(output.unique_consecutive().tolist())
    output = torch.full((RANKS << 20,), -1.0)
    input = output[(1 << 19) - 3 :][: 1 << 20].fill_(rank)
    dist.all_gather(list(output.chunk(RANKS)), input)
    got.append(output.unique_consecutive().tolist())
    return got


def test_an_input_that_overlaps_the_outputs_of_peers(ranks):
    assert ranks(RANKS).run(gather_from_the_place_of_a_peer) == [[[0, 1, 2]] * 4] * 3


def gather_into_leaves(async_op):
    outputs = [strided(4, 6).requires_grad_() for _ in range(RANKS)]
    input = expected_shards(4, 6)[dist.get_rank()].requires_grad_()
    work = as_list(outputs, input, async_op)
    if work is not None:
        work.wait()
    return [output.detach().clone() for output in outputs]


@pytest.mark.parametrize("async_op", [False, True])
def test_leaves_that_require_grad(ranks, async_op):
    for outputs in ranks(RANKS).run(gather_into_leaves, async_op):
        for output, right in zip(outputs, expected_shards(4, 6), strict=True):
            assert torch.equal(output, right)


def gather_across_dtypes():
    got = []
    for dtype in (torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64):
        input = torch.arange(16, dtype=torch.uint8).add(16 * dist.get_rank())
        input = (input % 2 if dtype == torch.bool else input).view(dtype)
        output = torch.empty(RANKS * input.numel(), dtype=dtype)
        dist.all_gather_into_tensor(output, input)
        got.append(output.view(torch.uint8))
    return got


def test_dtypes_that_gloo_lacks(ranks):
    right = torch.arange(48, dtype=torch.uint8)
    for got in ranks(RANKS).run(gather_across_dtypes):
        for output in got:
            assert torch.equal(output, right) or torch.equal(output, right % 2)


def gather_in_a_group_of_one():
    init_group("cpu:sdma")
    got = []
    for async_op in (False, True):
        output = torch.empty(3)
        work = single(output, torch.arange(3.0), async_op)
        if work is not None:
            work.wait()
        bad = raised(lambda on, o=output: single(o, torch.ones(4), on), async_op)
        got.append((output.tolist(), bad))
    dist.destroy_process_group()
    return got


def test_a_group_of_one(ranks):
    [got] = ranks(1, None).run(gather_in_a_group_of_one)
    for when, (output, bad) in zip(("call", "wait()"), got, strict=True):
        assert output == [0, 1, 2]
        assert bad[:2] == (when, "RuntimeError")
        message = bad[2]
        assert "Bad arguments on rank 0: all_gather_into_tensor: expected an output of 4" in message
