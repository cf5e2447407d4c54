"""What programs do to a model that ZeRO-2 has wrapped, between its steps: as with DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero2_linears import backward, linears, message_of

from pg_sdma.zero2 import AdamW, Zero2


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
