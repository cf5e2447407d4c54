"""Optimizers and gradient scalers beside ZeRO-2: as without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from zero2_linears import backward, linears, message_of

from pg_sdma.zero2 import AdamW, Zero2


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
