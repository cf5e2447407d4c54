"""What programs do with ZeRO-2's gradients, and when these come: as with DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero2_linears import backward, gradients, linears, message_of

from pg_sdma.zero2 import AdamW, Zero2, reduction


class Towers(nn.Module):
    """Equal blocks that each rank runs in an order of its own."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(count))

    def forward(self, x, order):
        return sum(self.blocks[index](x).sum() * 10.0**index for index in order)


def order_of_a_rank(count):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(dist.get_rank()))
    return order.tolist()


def run_in_any_order(count, at_once):
    model = Towers(count)
    zero = Zero2(model, model.blocks)
    order = order_of_a_rank(count)
    seen = []
    for _ in range(3):
        if at_once:
            model(torch.ones(1, 6), order).backward()
        else:
            for index in order:
                model(torch.ones(1, 6), [index]).backward()
        seen.append(gradients(zero))
        zero.gather()
    return order, seen


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("at_once", [True, False])
def test_ranks_may_have_gradients_in_different_orders(ranks, size, at_once):
    results = ranks(size).run(run_in_any_order, 5, at_once)
    assert len({tuple(order) for order, _ in results}) > 1
    for _, seen in results:
        for found in seen:
            assert found
            for name, values in found.items():
                assert values == pytest.approx([10.0 ** int(name.split(".")[1])]), name


def drop(model, how):
    if how == "model":
        model.zero_grad()
    elif how == "to zero":
        model.zero_grad(set_to_none=False)
    elif how == "modules":
        for module in model:
            module.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = None


def throw_a_batch_away(how, blocks, dtype):
    plain, model = linears(dtype=dtype), linears(dtype=dtype)
    zero = Zero2(model, list(model)[:blocks], shard_dtype=torch.float32)
    for _ in range(2):
        for one in (plain, model):
            backward(one, torch.full((2, 4), torch.nan, dtype=dtype))
            drop(one, how)
            backward(one)
        zero.finish()
        whole = torch.cat([p.grad.float().flatten() for p in plain.parameters()])
        norm = zero.grad_norm()
        torch.testing.assert_close(norm, whole.norm(), rtol=1e-2, atol=0)
        drop(plain, how)
        drop(model, how)
        before = [p.detach().clone() for p in model.parameters()]
        AdamW(zero, lr=0.1, weight_decay=0).step()
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [3, 1])
@pytest.mark.parametrize("how", ["model", "to zero", "modules", "parameters"])
def test_gradients_that_were_dropped_are_gone(ranks, how, blocks, dtype):
    ranks(2).run(throw_a_batch_away, how, blocks, dtype)


def drop_one_module():
    model = linears()
    zero = Zero2(model, [model[0], model[1]])
    backward(model)
    model[1].zero_grad()
    model[2].bias.grad = None
    return sorted(gradients(zero))


def test_dropping_some_gradients_leaves_the_others(ranks):
    names = {name for result in ranks(2).run(drop_one_module) for name in result}
    assert names == {"0.weight", "0.bias", "2.weight"}


def ask_for_gradients():
    model = linears()
    zero = Zero2(model, model)
    direct = torch.autograd.grad(
        model(torch.ones(1, 4)).sum(), list(model.parameters()), allow_unused=True
    )
    model(torch.ones(1, 4)).sum().backward(inputs=[model[0].weight])
    zero.finish()
    weight = dict(zero.named_parameters()).get("0.weight")
    if weight is not None:
        mine = weight.grad
        whole = direct[0].flatten()
        assert any(torch.equal(mine, whole[i : i + len(mine)]) for i in range(len(whole)))
    others = [p.grad for n, p in zero.named_parameters() if n != "0.weight"]
    assert not any(grad.any() for grad in others)


def test_asking_autograd_for_gradients_takes_nothing(ranks):
    ranks(2).run(ask_for_gradients)


def large_gradients(dtype):
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    zero = Zero2(model, [model])
    (model(torch.ones(1, 4, dtype=dtype)).sum() * 3e38).backward()
    zero.finish()
    return [p.grad.float().max().item() for p in zero.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_finite_where_the_sum_is_not(ranks, dtype):
    for largest in ranks(2).run(large_gradients, dtype):
        assert largest == pytest.approx([3e38], rel=1e-2)


def skip_some(find_unused, dtype):
    """Rank 0 skips the first block, all skip the second; with a buffer to spare nowhere."""
    model = linears(4, dtype=dtype)
    zero = Zero2(model, model, find_unused_parameters=find_unused)
    optimizer = AdamW(zero, lr=0.1)
    backward(model)
    optimizer.step()
    buffers = zero.gradient_bytes
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        x = torch.ones(2, 4, dtype=dtype)
        for index in [3] if dist.get_rank() == 0 else [0, 2, 3]:
            x = model[index](x)
        x.square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    moved = [not torch.equal(before[f"{i}.weight"], after[f"{i}.weight"]) for i in range(4)]
    return moved, zero.gradient_bytes - buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_gets_no_gradient_counts_as_zero(ranks, dtype):
    for moved, _ in ranks(2).run(skip_some, False, dtype):
        assert moved == [True, True, True, True]  # the optimizer's momentum, where it is zero


def test_what_no_rank_has_used_is_left_alone_where_it_is_asked_for(ranks):
    for moved, more_bytes in ranks(2).run(skip_some, True, torch.float32):
        assert moved == [True, False, True, True]
        assert more_bytes == 0  # known at once, nothing waits for it


class Recomputed(nn.Module):
    def __init__(self, frozen_head):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4).requires_grad_(not frozen_head)

    def forward(self, x):
        x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def recompute(frozen_head, find_unused):
    torch.manual_seed(0)
    plain = Recomputed(frozen_head)
    model = copy.deepcopy(plain)
    zero = Zero2(model, model.blocks, find_unused_parameters=find_unused)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=0.1), AdamW(zero, lr=0.1)
    reduced = count_reductions()
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            for _ in range(2):
                one(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return len(reduced)


def count_reductions():
    """Fills with the elements of each reduction of this process from now on."""
    elements = []
    reduce_scatter = reduction._reduce_scatter

    def counted(output, input, **options):
        elements.append(input.numel())
        return reduce_scatter(output, input, **options)

    reduction._reduce_scatter = counted
    return elements


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_backward_within_a_backward_is_one_micro_step(ranks, frozen_head, find_unused):
    reductions = 3 * (2 * 4 + (0 if frozen_head else 1))
    pool = ranks(2)
    assert pool.run(recompute, frozen_head, find_unused) == [reductions] * 2


def reduce_others(dtype, reduce_dtype):
    model = nn.ModuleDict(
        {"embedding": nn.Linear(64, 64), "block": nn.Linear(8, 64), "norm": nn.LayerNorm(64)}
    ).to(dtype)
    zero = Zero2(model, [model["block"]], reduce_dtype=reduce_dtype)
    elements = count_reductions()
    for _ in range(4):
        x = model["block"](torch.ones(1, 8, dtype=dtype))
        model["norm"](model["embedding"](x)).sum().backward()
    zero.finish()
    return sum(elements), {unit.layout.name: unit.layout.numel for unit in zero._units}


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "times"),
    [
        (torch.float32, None, 1),
        (torch.bfloat16, torch.float32, 1),
        (torch.bfloat16, None, 4),  # adding up in bf16 would lose what is small
    ],
)
def test_what_has_a_buffer_of_its_own_is_reduced_once_a_step(ranks, dtype, reduce_dtype, times):
    for elements, numel in ranks(2).run(reduce_others, dtype, reduce_dtype):
        assert elements == 4 * numel["block"] + times * (numel["embedding"] + numel["norm"])


def reduce_in_fp32(reduce_dtype):
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    zero = Zero2(model, [model], shard_dtype=torch.float32, reduce_dtype=reduce_dtype)
    # 1 and 2**-9 are 1 in bf16.
    (model(torch.ones(1, 64, dtype=torch.bfloat16)).sum() * (1, 2**-9)[dist.get_rank()]).backward()
    zero.finish()
    return [p.grad.unique().tolist() for p in zero.parameters()]


def test_gradients_are_summed_in_the_dtype_that_is_asked_for(ranks):
    assert ranks(2).run(reduce_in_fp32, torch.float32) == [[[0.5 + 2**-10]]] * 2
    assert ranks(2).run(reduce_in_fp32, None) == [[[0.5]]] * 2


def compute_with_gradients():
    model = linears()
    zero = Zero2(model, model)
    backward(model)
    assert zero.grad_norm() > 0
    repr(model[0].weight.grad)
    return (
        message_of(nn.utils.clip_grad_norm_, model.parameters(), 1.0),
        message_of(lambda: model[0].weight.grad.norm()),
    )


def test_computing_with_a_models_gradients_says_what_to_call(ranks):
    for words in ranks(2).run(compute_with_gradients):
        for one in words:
            assert "the gradient of 0.weight is in shards" in one
            assert "call clip_grad_norm_ or grad_norm of the Zero2" in one
