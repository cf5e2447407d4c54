"""ZeRO-2: every rank has the whole model and a part of its gradients and optimizer state.

zero = Zero2(model, model.blocks)
optimizer = AdamW(zero, lr=3e-4)
for inputs, targets in micro_steps:
    (loss(model(inputs), targets) / len(micro_steps)).backward()
zero.clip_grad_norm_(1.0)
optimizer.step()
"""

from __future__ import annotations

from pg_sdma.zero2.layout import gradient_bytes
from pg_sdma.zero2.optimizer import AdamW
from pg_sdma.zero2.sharded import Zero2

__all__ = ["AdamW", "Zero2", "gradient_bytes"]
