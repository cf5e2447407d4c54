"""A decoder-only transformer over bytes, in the shape of GPT-2, without dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

VOCABULARY = 256  # one token is one byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. Raises ValueError where the hidden size does not divide into the heads."""

    hidden: int
    layers: int
    heads: int
    seq: int  # longest sequence, in bytes
    vocabulary: int = VOCABULARY  # rows of the embedding; more than there are bytes are never used
    biases: bool = False
    tied: bool = False  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden size {self.hidden} is no multiple of {self.heads} heads")


# The usual sizes of the GPT papers. Their names count a vocabulary of tens of thousands of tokens;
# with 256 the embeddings all but vanish ("124m" has 86 million parameters).
PRESETS = {
    "tiny": GPTConfig(hidden=32, layers=2, heads=2, seq=32),
    "demo": GPTConfig(hidden=128, layers=4, heads=4, seq=128),
    "124m": GPTConfig(hidden=768, layers=12, heads=12, seq=1024),
    # GPT-2 itself, its vocabulary rounded up to a multiple of 128.
    "gpt2-124m": GPTConfig(
        hidden=768, layers=12, heads=12, seq=1024, vocabulary=50304, biases=True, tied=True
    ),
    "1b": GPTConfig(hidden=2048, layers=24, heads=16, seq=2048),
    "3b": GPTConfig(hidden=3072, layers=28, heads=24, seq=2048),
    "7b": GPTConfig(hidden=4096, layers=34, heads=32, seq=2048),
}


class Attention(nn.Module):
    """Causal self-attention: (batch, seq, hidden) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.biases)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """One pre-norm transformer layer: (batch, seq, hidden) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, bias=config.biases)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, bias=config.biases)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=config.biases)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte. Built on the meta device it takes no memory until `to_empty`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, bias=config.biases)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte (fp32 scalar); both arguments int64 (batch, seq)."""
        position = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Sets every weight from `seed` alone: the same model on any number of ranks.

        Each full tensor exists for a moment on its way to this rank's shard; nothing is
        communicated.
        """
        generator = torch.Generator(self.head.weight.device).manual_seed(seed)
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            bias = name.endswith("bias")
            full = torch.full(parameter.shape, 0.0 if bias else 1.0, device=parameter.device)
            if not bias and "norm" not in name:
                std = residual if name.endswith(("out.weight", "down.weight")) else 0.02
                full.normal_(std=std, generator=generator)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(full)

    def parameter_count(self) -> int:
        """Number of parameters of the whole model, over all ranks."""
        return sum(p.numel() for p in self.parameters())
