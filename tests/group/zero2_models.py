"""Small models of the kinds that people train, for ZeRO-2 beside DDP.

Each is made by a function of no arguments: `(model, blocks, loss)`, where `loss(model, step, rank)`
is the loss of one micro-batch, which differs between ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint


def data(*shape, step, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(97 * step + rank))


def dtype_of(model):
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def feed(*shape):
    """The mean square of what the model makes of random inputs."""

    def loss(model, step, rank):
        x = data(*shape, step=step, rank=rank).to(dtype_of(model))
        return (model(x).float() - 1).square().mean()

    return loss


class Residual(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = x + block(x).tanh()
        return x


class Towers(nn.Module):
    """Two towers that ranks run in different orders."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(Residual(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x, rank):
        order = (0, 1) if rank == 0 else (1, 0)
        return sum(self.towers[index](x) * (index + 1) for index in order)


def towers():
    model = Towers()

    def loss(model, step, rank):
        x = data(3, 8, step=step, rank=rank).to(dtype_of(model))
        return model(x, rank).float().square().mean()

    return model, [block for tower in model.towers for block in tower], loss


class MixtureOfExperts(nn.Module):
    """Each token goes to one expert; in some steps some get none, on one rank or on all."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().squeeze(1)
            part = self.experts[index](x[rows]) * weights[rows, index, None]
            out = out.index_add(0, rows, part)
        return self.norm(x + out)


def mixture_of_experts():
    model = MixtureOfExperts()
    return model, list(model.experts), feed(2, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = Residual(*(nn.Linear(8, 8) for _ in range(3)))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def tied():
    model = Tied()

    def loss(model, step, rank):
        tokens = data(6, step=step, rank=rank).mul(100).long().remainder(11)
        return nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 11)

    return model, list(model.blocks), loss


def frozen():
    model = Residual(*(nn.Linear(8, 8) for _ in range(4)))
    model[1].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model, list(model), feed(3, 8)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def lstm():
    model = Recurrent()
    return model, [model.lstm], feed(2, 5, 6)


def channels_last():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    ).to(memory_format=torch.channels_last)
    return model, [model[0], model[2]], feed(2, 4, 8, 8)


def normalised_weights():
    model = Residual(*(weight_norm(nn.Linear(8, 8)) for _ in range(3)))
    return model, list(model), feed(3, 8)


class Scaled(nn.Module):
    """A scalar for each block, compiled as a whole: all gradients come at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(0.5)) for _ in range(4))
        self.compiled = torch.compile(self.run, backend="aot_eager")

    def run(self, x):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + scale * block(x).tanh()
        return x

    def forward(self, x):
        return self.compiled(x)


def compiled():
    model = Scaled()
    return model, list(model.blocks), feed(3, 8)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.embedding(x)
        for index, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=index % 2 == 0).tanh()
        return self.head(x)


def checkpointed():
    model = Checkpointed()
    return model, list(model.blocks), feed(3, 8)


class Pair(nn.Module):
    """A generator and a discriminator, whose losses take turns."""

    def __init__(self):
        super().__init__()
        self.generator = Residual(nn.Linear(6, 6), nn.Linear(6, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, noise, real):
        if real is None:
            return nn.functional.softplus(-self.discriminator(self.generator(noise)))
        made = self.discriminator(self.generator(noise).detach())
        return nn.functional.softplus(made) + nn.functional.softplus(-self.discriminator(real))


def pair():
    model = Pair()

    def loss(model, step, rank):
        dtype = dtype_of(model)
        noise, real = data(2, 3, 6, step=step, rank=rank).to(dtype)
        return model(noise, real if step % 2 else None).float().mean()

    return model, [*model.generator, model.discriminator], loss


class LowRank(nn.Module):
    """A frozen layer and what is added to it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def low_rank():
    model = nn.Sequential(
        nn.Linear(8, 8).requires_grad_(False), Residual(*(LowRank() for _ in range(3)))
    )
    return model, list(model[1]), feed(3, 8)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(
            8, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8, dropout=0.0
        )

    def forward(self, x):
        return self.model(x, x.flip(0))


def encoder_decoder():
    model = EncoderDecoder()
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return model, blocks, feed(4, 2, 8)


MODELS = {
    make.__name__: make
    for make in (
        towers,
        mixture_of_experts,
        tied,
        frozen,
        lstm,
        channels_last,
        normalised_weights,
        compiled,
        checkpointed,
        pair,
        low_rank,
        encoder_decoder,
    )
}
