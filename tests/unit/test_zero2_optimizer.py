"""AdamW over shards against torch's, on a group of one rank."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pg_sdma.zero2 import AdamW, Zero2, optimizer, reduction
from pg_sdma.zero2.rounding import Key


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


@pytest.mark.parametrize("chunk", [1, 50, 2**24])
def test_it_has_torchs_bits_however_it_is_cut(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "CHUNK", chunk)
    plain = model()
    sharded = copy.deepcopy(plain)
    zero = Zero2(sharded, sharded, shard_dtype=torch.float32)
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    both = torch.optim.AdamW(plain.parameters(), **options), AdamW(zero, **options)  # type: ignore[arg-type]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in both]
    for _ in range(3):
        x = torch.randn(5, 6)
        for module, one, schedule in zip((plain, sharded), both, schedules, strict=True):
            module(x).square().sum().backward()
            one.step()
            one.zero_grad()
            schedule.step()
        for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(a, b)


def test_bf16_gradients_are_widened() -> None:
    network = model().bfloat16()
    zero = Zero2(network, network)
    stepper = AdamW(zero, lr=0.1)
    network(torch.randn(5, 6).bfloat16()).square().sum().backward()
    zero.finish()
    copies = [parameter.detach().clone().requires_grad_() for parameter in zero.parameters()]
    for parameter, twin in zip(zero.parameters(), copies, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.any()
        twin.grad = parameter.grad.float()
    torch.optim.AdamW(copies, lr=0.1).step()
    stepper.step()
    for parameter, twin in zip(zero.parameters(), copies, strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, twin)
    whole = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert torch.equal(whole, torch.cat(copies).detach().bfloat16())


def test_clipping_leaves_gradients_below_the_norm_alone() -> None:
    network = model()
    zero = Zero2(network, network, shard_dtype=torch.float32)
    network(torch.randn(5, 6)).square().sum().backward()
    norm = zero.grad_norm().item()
    before = [parameter.grad.clone() for parameter in zero.parameters()]
    assert zero.clip_grad_norm_(2 * norm).item() == norm
    for parameter, gradient in zip(zero.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_closure_is_called_first() -> None:
    network = model()
    zero = Zero2(network, network)

    def closure() -> float:
        loss = network(torch.ones(1, 6)).sum()
        loss.backward()
        return loss.item()

    before = network[0].weight.detach().clone()
    assert isinstance(AdamW(zero).step(closure), float)
    assert not torch.equal(before, network[0].weight)


def test_no_two_reductions_have_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Key] = []
    accumulate = reduction.accumulate

    def watched(*arguments: object) -> None:
        keys.append(arguments[-1])  # type: ignore[arg-type]
        accumulate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reduction, "accumulate", watched)
    network = model()
    zero = Zero2(network, network, seed=77)
    stepper = AdamW(zero)
    for _ in range(3):
        for _ in range(2):
            network(torch.ones(1, 6)).sum().backward()
        stepper.step()
    expected = {
        Key(77, step, micro_step, unit)
        for step in range(3)
        for micro_step in range(2)
        for unit in range(4)
    }
    assert len(keys) == len(expected)
    assert set(keys) == expected


class Counted:
    """Stands for a parameter; counts how often it is asked for its size."""

    asked = 0

    def numel(self) -> int:
        Counted.asked += 1
        return optimizer.CHUNK // 100


def test_chunks_are_cut_in_one_pass() -> None:
    chunks = list(optimizer._chunks(Counted() for _ in range(1000)))  # type: ignore[misc]
    assert [len(chunk) for chunk in chunks] == [101] * 9 + [91]
    assert Counted.asked == 1000


def test_a_model_that_is_not_used_any_more_goes() -> None:
    network = model()
    zero = Zero2(network, network)
    network(torch.ones(1, 6)).sum().backward()
    AdamW(zero).step()
    gone = weakref.ref(network), weakref.ref(zero)
    del network, zero
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_wrapped_model_can_be_copied() -> None:
    network = model()
    zero = Zero2(network, network)
    network(torch.ones(1, 6)).sum().backward()
    twin = copy.deepcopy(network)
    torch.save(network, io.BytesIO())
    with torch.no_grad():
        twin[0].weight.zero_()
    twin.load_state_dict(twin.state_dict())
    AdamW(zero).step()
    assert network[0].weight.any()
    assert not twin[0].weight.any()
