"""What programs do to a model between its steps, and with ZeRO-2's gradients: as with DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pg_sdma.zero2 import AdamW, Zero2, reduction


def linears(count=3, size=4, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(count))).to(dtype)


def backward(model, x=None):
    parameter = next(model.parameters())
    x = torch.ones(2, parameter.shape[-1], dtype=parameter.dtype) if x is None else x
    loss = model(x).square().sum()
    loss.backward()
    return loss


def message_of(function, *arguments, **options):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        function(*arguments, **options)
    return str(caught.value)


def gradients(zero):
    zero.finish()
    return {n: p.grad.unique().tolist() for n, p in zero.named_parameters() if p.grad is not None}


def change(model, how):
    weight = model[0].weight
    seven = torch.full_like(weight, 7)
    if how == "load":
        model.load_state_dict({**model.state_dict(), "0.weight": seven})
    elif how == "assign":
        model.load_state_dict({**model.state_dict(), "0.weight": seven}, assign=True)
    elif how == "in place":
        with torch.no_grad():
            weight.clamp_(7, 7)
    elif how == "data":
        weight.data.fill_(7)
    elif how == "other memory":
        weight.data = seven
    else:
        # An average's weights for evaluation, and back again.
        before = weight.data
        weight.data = torch.zeros_like(before)
        weight.data = before
        weight.data.fill_(7)


HOWS = ("load", "assign", "in place", "data", "other memory", "swap")


def change_outside(dtype):
    results = {}
    for how in HOWS:
        model = linears(dtype=dtype)
        zero = Zero2(model, model)
        optimizer = AdamW(zero, lr=0.01, weight_decay=0)
        backward(model)
        optimizer.step()
        masters = {name: parameter.detach().clone() for name, parameter in zero.named_parameters()}
        change(model, how)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        backward(model)
        optimizer.step()
        untouched = all(
            torch.equal(parameter, masters[name])
            for name, parameter in zero.named_parameters()
            if name != "0.weight"
        )
        kept = model[0].weight.unique().tolist()
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        backward(model)
        optimizer.step()
        trains = not model[0].weight.eq(7).any().item()
        results[how] = (kept, untouched, trains)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_was_changed_is_where_the_next_step_starts(ranks, dtype):
    for results in ranks(2).run(change_outside, dtype):
        assert results == dict.fromkeys(HOWS, ([7.0], True, True))


def lose_a_parameter():
    model = linears()
    zero = Zero2(model, model)
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    backward(model)
    lost = message_of(AdamW(zero).step)
    other = linears()
    cast = Zero2(other, other)
    other.to(torch.bfloat16)
    return lost, message_of(cast.finish)


def test_a_parameter_that_is_lost_is_named(ranks):
    for lost, cast in ranks(2).run(lose_a_parameter):
        assert "1.weight was replaced, so that its gradient is lost" in lost
        assert "0.weight has become torch.bfloat16 (4, 4)" in cast


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


def differ_at_first():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 2, 1).to(memory_format=torch.channels_last),
    )
    model[2].requires_grad_(False)
    model[1].running_mean.fill_(dist.get_rank())
    model[1].num_batches_tracked.fill_(dist.get_rank())
    Zero2(model, [model[0]])
    return model.state_dict()


def test_frozen_parameters_and_buffers_are_rank_0s_too(ranks):
    first, *others = ranks(3).run(differ_at_first)
    for state in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, state[name]), name


def group_by_dimensions():
    plain, model = linears(), linears()
    zero = Zero2(model, model)

    def groups(of):
        return [
            {"params": [p for p in of.parameters() if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in of.parameters() if p.dim() < 2], "weight_decay": 0},
        ]

    optimizers = torch.optim.AdamW(groups(plain), lr=0.1), AdamW(zero, groups(model), lr=0.1)
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            backward(one)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return message_of(AdamW, zero, linears().parameters())


def test_an_optimizer_takes_the_models_parameters_and_no_others(ranks):
    for words in ranks(2).run(group_by_dimensions):
        assert "a parameter of shape (4, 4) is none of the model's" in words


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


def two_optimizers():
    plain, model = linears(2), linears(2)
    zero = Zero2(model, model)
    both = [
        (torch.optim.AdamW(p.parameters(), lr=0.1), AdamW(zero, m.parameters(), lr=0.1))
        for p, m in zip(plain, model, strict=True)
    ]
    for step in range(4):
        backward(plain)
        backward(model)
        optimizer, sharded = both[step % 2]
        # The other one's gradients add up until its turn.
        for one in (optimizer, sharded):
            one.step()
            one.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_leaves_another_optimizers_gradients(ranks):
    ranks(2).run(two_optimizers)


def scale_losses(unscale, where):
    """One rank's shard has an infinite gradient in the second step; returns scales and skips."""
    model = linears()
    zero = Zero2(model, model)
    optimizer = AdamW(zero, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for step in range(3):
        before = model[0].weight.detach().clone()
        x = torch.ones(2, 4)
        if step == 1 and dist.get_rank() == where:
            x[0, 0] = torch.inf
        scaler.scale(model[0](x)[:, :1].sum() + 0 * model(torch.ones(2, 4)).sum()).backward()
        if unscale:
            zero.finish()
            scaler.unscale_(optimizer)
            zero.clip_grad_norm_(1e9)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), torch.equal(before, model[0].weight)))
    return seen


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_a_scaler_skips_the_step_of_all_ranks(ranks, unscale, where):
    results = ranks(2).run(scale_losses, unscale, where)
    assert results == [[(1024.0, False), (512.0, True), (512.0, False)]] * 2


def unscale_too_early():
    model = linears()
    zero = Zero2(model, model)
    optimizer = AdamW(zero)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    return message_of(scaler.step, optimizer)


def test_unscaling_before_the_gradients_are_there_is_refused(ranks):
    for words in ranks(2).run(unscale_too_early):
        assert "call the Zero2's finish() before it" in words


def freeze_and_wrap_again():
    plain, model = linears(), linears()
    zero = Zero2(model, model)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=0.1), AdamW(zero, lr=0.1)

    def step(*optimizers):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            backward(one)
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    step(*optimizers)
    for one in (plain, model):
        one[0].requires_grad_(False)
    step(*optimizers)
    again = Zero2(model, model)
    assert not any(name.startswith("0.") for name in again.names)
    trained = [p for p in plain.parameters() if p.requires_grad]
    step(torch.optim.AdamW(trained, lr=0.1), AdamW(again, lr=0.1))
    earlier = message_of(optimizers[1].step)
    again.remove()
    backward(model)
    assert model[1].weight.grad.any()
    return earlier


def test_a_model_is_frozen_step_by_step_and_wrapped_again(ranks):
    for words in ranks(2).run(freeze_and_wrap_again):
        assert "the model was wrapped anew" in words


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


def attach_sgd():
    plain, model = linears(), linears()
    zero = Zero2(model, model)
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.01, momentum=0.9) for of in (plain, zero)]
    zero.attach(optimizers[1])
    for _ in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            backward(one)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_optimizer_is_attached(ranks):
    ranks(2).run(attach_sgd)


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


def refuse_on_one_rank():
    mine = dist.get_rank() == 1
    model = linears()
    other = linears(5)
    words = {
        "block": message_of(Zero2, model, [other] if mine else model),
        "dtype": message_of(Zero2, linears(dtype=torch.float64 if mine else torch.float32), []),
        "model": message_of(Zero2, other if mine else model, []),
        "option": message_of(Zero2, model, model, seed=dist.get_rank()),
    }
    zero = Zero2(model, model)
    optimizer = AdamW(zero)
    state, moments = zero.state_dict(), optimizer.state_dict()
    words["state"] = message_of(
        zero.load_state_dict, {**state, **({"parameters": {}} if mine else {})}
    )
    words["place"] = message_of(zero.load_state_dict, {**state, "step": 5 + mine})
    words["moments"] = message_of(
        optimizer.load_state_dict, {**moments, **({"state": {}} if mine else {})}
    )
    backward(model)
    optimizer.step()
    return words


def test_what_one_rank_refuses_all_refuse_at_once(ranks):
    first, second = ranks(2).run(refuse_on_one_rank, timeout=30)
    assert "no part of the model" in second["block"]
    assert "wrapping the model is refused by rank 1: ValueError" in first["block"]
    assert "wrapping the model is refused by rank 1: TypeError" in first["dtype"]
    assert "missing in the state" in second["state"]
    assert "loading a state is refused by rank 1" in first["state"]
    assert "the state has nothing of 0.weight" in second["moments"]
    assert "loading the optimizer's state is refused by rank 1" in first["moments"]
    for words in (first, second):
        assert "differs between ranks: rank 0 has 4 parts, rank 1 6" in words["model"]
        assert "differs between ranks: rank 0 has (" in words["option"]
        assert "differs between ranks: rank 0 has 5, rank 1 6" in words["place"]
