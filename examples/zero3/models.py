"""The models of train_zero3.py: GPTs, and Qwen3s from their configuration. Both work on bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.gpt import GPT, VOCABULARY, GPTConfig
from common.gpt import PRESETS as GPT_PRESETS

# A context in which a parameter that DeepSpeed has partitioned is whole and may be written.
Whole = Callable[[nn.Parameter], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3, as its config.json has them; the rest is transformers' Qwen3Config."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    seq: int  # of the training, in bytes
    vocabulary: int = VOCABULARY
    tied: bool = False  # whether the head is the embedding


ModelConfig = GPTConfig | Qwen3Config


def _published(**sizes: Any) -> Qwen3Config:
    """A published Qwen3. Bytes are its first 256 tokens; the other rows weigh on the gathers."""
    return Qwen3Config(key_value_heads=8, head_dim=128, seq=1024, vocabulary=151_936, **sizes)


MODELS: dict[str, ModelConfig] = {
    "gpt-tiny": GPT_PRESETS["tiny"],
    # Wider than the FSDP2 demo: DeepSpeed keeps parameters of less than 100,000 elements whole.
    "gpt-demo": GPTConfig(hidden=256, layers=4, heads=4, seq=128),
    "gpt-124m": GPT_PRESETS["124m"],
    "gpt-1b": GPT_PRESETS["1b"],
    "gpt-7b": GPTConfig(hidden=4096, layers=32, heads=32, seq=2048),
    "qwen3-tiny": Qwen3Config(
        hidden=32, layers=2, heads=4, key_value_heads=2, head_dim=8, intermediate=96, seq=32
    ),
    "qwen3-demo": Qwen3Config(
        hidden=256, layers=4, heads=4, key_value_heads=2, head_dim=64, intermediate=768, seq=128
    ),
    "qwen3-0.6b": _published(hidden=1024, layers=28, heads=16, intermediate=3072, tied=True),
    "qwen3-8b": _published(hidden=4096, layers=36, heads=32, intermediate=12_288),
    "qwen3-32b": _published(hidden=5120, layers=64, heads=64, intermediate=25_600),
}


class Qwen3(nn.Module):
    """transformers' Qwen3 with the loss of `GPT.forward`: it predicts the next byte."""

    def __init__(self, config: Qwen3Config) -> None:
        import transformers

        super().__init__()
        self.config = config
        self.model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=config.vocabulary,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.key_value_heads,
                head_dim=config.head_dim,
                max_position_embeddings=max(config.seq, 40_960),
                tie_word_embeddings=config.tied,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                use_cache=False,
            )
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte (fp32 scalar); both arguments int64 (batch, seq)."""
        logits = self.model(input_ids=inputs).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_maker(config: ModelConfig) -> Callable[[], GPT | Qwen3]:
    """A function that makes the model, with weights that mean nothing before `initialise`.

    What it needs is imported here and now: transformers imports torch's compiler, which refuses to
    be imported under zero.Init, where tensors' constructors are not torch's own.
    """
    if isinstance(config, GPTConfig):
        return partial(GPT, config)
    from transformers import Qwen3ForCausalLM  # noqa: F401

    return partial(Qwen3, config)


@torch.no_grad()
def initialise(model: GPT | Qwen3, seed: int, whole: Whole = nullcontext) -> None:
    """Sets every weight from `seed` alone, as GPT-2 does: the same on any number of ranks.

    Within `whole(parameter)` a parameter has its full shape, one at a time.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    residual = 0.02 / (2 * model.config.layers) ** 0.5
    # What is added to the residual stream: of a GPT, and of a Qwen3.
    adds = ("out.weight", "down.weight", "o_proj.weight", "down_proj.weight")
    for name, parameter in model.named_parameters():
        with whole(parameter):
            if "norm" in name:
                parameter.fill_(1)
            else:
                std = residual if name.endswith(adds) else 0.02
                parameter.normal_(std=std, generator=generator)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters of the whole model, counted without making any."""
    make_model = model_maker(config)
    with torch.device("meta"):
        return sum(p.numel() for p in make_model().parameters())
