"""What rounding does to gradients that are added up in bf16, as a picture.

    python benchmarks/zero2_rounding.py docs/zero2_rounding.png

Adds 1,024 micro-gradients into a bf16 shard, each a constant mean and noise of the same size. It
rounds stochastically, as ZeRO-2 does, and to nearest. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pg_sdma.zero2.rounding import Key, accumulate

MICRO_STEPS = 1024
ELEMENTS = 2**16


@dataclass(frozen=True)
class Bias:
    """Relative errors after each micro-step, averaged over the elements, (micro_steps,) in fp64."""

    stochastic: Tensor
    nearest: Tensor
    spread: Tensor  # of single elements' errors with stochastic rounding: standard deviation


def measure(seed: int, micro_steps: int = MICRO_STEPS, elements: int = ELEMENTS) -> Bias:
    """Adds up the same bf16 micro-gradients in both ways, and exactly in fp64."""
    generator = torch.Generator().manual_seed(seed)
    # Means over one binade, so that no place between two bf16 neighbours is preferred.
    mean = 2 ** torch.rand(elements, generator=generator)
    exact = torch.zeros(elements, dtype=torch.float64)
    stochastic, nearest = (torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2))
    rows = []
    for micro_step in range(micro_steps):
        noise = torch.randn(elements, generator=generator)
        gradient = (mean + mean * noise).bfloat16()
        exact += gradient
        nearest += gradient
        accumulate(stochastic, gradient, 0, 1.0, micro_step == 0, Key(seed, 0, micro_step, 0))
        error = (stochastic.double() - exact) / exact.mean()
        lost = (nearest.double() - exact) / exact.mean()
        rows.append(torch.stack([error.mean(), lost.mean(), error.std()]))
    return Bias(*torch.stack(rows).unbind(1))


def draw(bias: Bias, path: Path) -> None:
    """Both errors against the number of micro-gradients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(bias.nearest) + 1)
    axes.plot(steps, 100 * bias.nearest, color="#4a7fb5", label="rounded to nearest, mean")
    axes.plot(steps, 100 * bias.stochastic, color="#b30000", label="stochastically, mean")
    low, high = (100 * (bias.stochastic + sign * bias.spread) for sign in (-1, 1))
    axes.fill_between(
        steps, low, high, color="#b30000", alpha=0.2, linewidth=0, label="single elements, 1 std"
    )
    axes.set_xlabel("micro-gradients added in bf16")
    axes.set_ylabel("error of the sum (%)")
    axes.set_title(
        f"{ELEMENTS:,} elements, noise as large as the mean. After {len(bias.nearest):,}: "
        f"nearest {bias.nearest[-1]:+.1%}, stochastic {bias.stochastic[-1]:+.3%}",
        fontsize=11,
    )
    axes.legend(frameon=False, loc="lower left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the error of gradients summed in bf16.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bias = measure(options.seed)
    draw(bias, options.picture)
    print(
        f"after {len(bias.nearest):,} micro-gradients: nearest {bias.nearest[-1]:+.2%}, "
        f"stochastic {bias.stochastic[-1]:+.4%} (single elements: {bias.spread[-1]:.2%})"
    )


if __name__ == "__main__":
    main()
