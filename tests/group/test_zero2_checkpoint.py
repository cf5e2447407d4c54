"""ZeRO-2's state in torch.distributed.checkpoint: training goes on, on any number of ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from pg_sdma.zero2 import AdamW, Zero2

BATCH = 6  # divides by every number of ranks


class Model(nn.Module):
    """Sizes that do not divide, a scalar, a channels_last weight, something frozen, two dtypes."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.blocks[1].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        x = self.convolution(x.to(self.scale.dtype)).flatten(1) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x).float()


@dataclass
class Training:
    model: Model
    zero: Zero2
    optimizer: AdamW


def start(seed, dtype, by_dimensions=True):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    torch.manual_seed(3)  # what is frozen is not in the state
    nn.init.normal_(model.blocks[1].weight)
    zero = Zero2(model, model.blocks, seed=seed)
    trained = [p for p in model.parameters() if by_dimensions or p.dim() >= 2]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return Training(model, zero, AdamW(zero, [g for g in groups if g["params"]], lr=0.02))


def train(training, steps):
    """The loss of each step over all ranks' data, which does not depend on their number."""
    losses = []
    for step in steps:
        x = torch.randn(2, BATCH, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        for micro_batch in x.unbind():
            mine = micro_batch.chunk(dist.get_world_size())[dist.get_rank()]
            loss = (training.model(mine) - 1).square().mean() / 2
            loss.backward()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(whole.item() / dist.get_world_size())
        training.optimizer.step()
    return losses


def save(training, folder):
    dcp.save({"zero": training.zero, "optimizer": training.optimizer}, checkpoint_id=folder)


def load(training, folder):
    dcp.load({"zero": training.zero, "optimizer": training.optimizer}, checkpoint_id=folder)


def uninterrupted(steps, dtype):
    training = start(1, dtype)
    return train(training, range(steps)), training.model.state_dict()


def part(steps, dtype, from_folder, to_folder):
    training = start(1 if from_folder is None else 2, dtype)
    if from_folder is not None:
        load(training, from_folder)
    losses = train(training, steps)
    save(training, to_folder)
    return losses, training.model.state_dict()


def parts(ranks, sizes, dtype, folder):
    """Three steps on each of these numbers of ranks, from one checkpoint to the next."""
    losses, model = [], None
    for index, size in enumerate(sizes):
        steps = range(3 * index, 3 * index + 3)
        before = str(folder / str(index - 1)) if index else None
        ran = ranks(size).run(part, steps, dtype, before, str(folder / str(index)))
        losses += ran[0][0]
        model = ran[0][1]
    return losses, model


def test_training_goes_on_with_another_number_of_ranks(ranks, tmp_path):
    whole, whole_model = ranks(2).run(uninterrupted, 9, torch.float32)[0]
    losses, model = parts(ranks, (2, 3, 2), torch.float32, tmp_path)
    assert whole[-1] < whole[0] / 2
    assert losses == pytest.approx(whole, rel=1e-5, abs=1e-7)
    for name, tensor in whole_model.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_with_the_same_bits_on_as_many_ranks(ranks, tmp_path, dtype):
    whole, whole_model = ranks(2).run(uninterrupted, 6, dtype)[0]
    losses, model = parts(ranks, (2, 2), dtype, tmp_path)
    assert losses == whole
    for name, tensor in whole_model.items():
        assert torch.equal(model[name], tensor), name


def look_at_the_state():
    training = start(1, torch.bfloat16)
    train(training, range(2))
    state = training.zero.state_dict()
    moments = training.optimizer.state_dict()
    fits = []
    for name, parameter in training.model.named_parameters():
        if not parameter.requires_grad:
            assert name not in state["parameters"]
            continue
        saved = state["parameters"][name]
        assert isinstance(saved, DTensor)
        assert saved.dtype == torch.float32
        assert saved.shape == parameter.shape
        whole = saved.full_tensor()
        # The model's weights, and digits that they have no room for.
        assert torch.equal(whole.bfloat16(), parameter)
        fits.append(torch.equal(whole, parameter.float()))
        entry = moments["state"][name]
        assert entry["step"] == 2
        assert entry["exp_avg"].full_tensor().shape == parameter.shape
    assert not all(fits)
    whole = {name: saved.full_tensor() for name, saved in state["parameters"].items()}
    other = start(2, torch.bfloat16)
    other.zero.load_state_dict({**state, "parameters": whole})
    for a, b in zip(training.zero.parameters(), other.zero.parameters(), strict=True):
        assert torch.equal(a, b)
    return [group["params"] for group in moments["param_groups"]]


def test_the_state_has_the_models_shapes_and_all_digits(ranks):
    decayed, others = ranks(3).run(look_at_the_state)[0]
    assert decayed == [
        *("convolution.weight", "blocks.0.weight", "blocks.2.weight"),
        "head.weight",
    ]
    assert "scale" in others
    assert "blocks.1.bias" in others


def refuse_states():
    training = start(1, torch.float32)
    zero, moments = training.zero.state_dict(), training.optimizer.state_dict()
    other = start(1, torch.float32, by_dimensions=False)
    words = []
    wrong = copy.copy(zero["parameters"])
    wrong["head.weight"] = wrong["head.bias"]
    for load_state, state in (
        (training.zero.load_state_dict, {**zero, "parameters": wrong}),
        (training.optimizer.load_state_dict, other.optimizer.state_dict()),
        (other.optimizer.load_state_dict, moments),
    ):
        with pytest.raises(ValueError, match=r"^rank \d of 2, ZeRO-2: ") as caught:
            load_state(state)
        words.append(str(caught.value))
    training.model(torch.ones(1, 3, 2, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="between the micro-steps of step 0"):
        training.optimizer.state_dict()
    return words


def test_a_state_of_something_else_is_refused_by_all(ranks):
    for shape, fewer, more in ranks(2).run(refuse_states):
        assert "head.weight is of shape (1, 5) here and of shape (1,) in the state" in shape
        assert "the state has 1 groups of parameters, the optimizer 2" in fewer
        assert "the state has 2 groups of parameters, the optimizer 1" in more
