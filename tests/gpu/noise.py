"""What a rank does beside its all-gathers to shift them against each other and against the peers.

Nothing of it changes a result, unless something is read or written too early or too late.
"""

from __future__ import annotations

import random

import torch

LONGEST_SLEEP = 1_000_000  # clock cycles, about half a millisecond
LARGEST_BLOCK = 24 << 20


class Noise:
    """Each call does a little of it on the current stream and others, by dice of the rank's own."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._streams = [torch.cuda.Stream(priority=priority) for priority in (0, 0, -1)]
        self._a = torch.ones(2048, 2048, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()

    def __call__(self) -> None:
        chance = self._dice.random
        if chance() < 0.4:
            with torch.cuda.stream(self._dice.choice(self._streams)):
                for _ in range(self._dice.randint(1, 4)):
                    torch.mm(self._a, self._a)
        if chance() < 0.1:
            torch.mm(self._a, self._a)
        if chance() < 0.1:
            torch.cuda._sleep(self._dice.randrange(LONGEST_SLEEP))
        if chance() < 0.2:
            # Takes what was freed last, and leaves its own bytes to whoever takes it next.
            size = self._dice.randrange(LARGEST_BLOCK)
            torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xFF)
        if chance() < 0.005:
            torch.cuda.empty_cache()  # waits for the device, and frees by the driver
