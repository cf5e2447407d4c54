"""Small models for ZeRO-2, and what tests do with them again and again."""

from __future__ import annotations

import pytest
import torch
from torch import nn


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
