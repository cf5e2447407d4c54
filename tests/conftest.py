"""What all tests have in common."""

from __future__ import annotations

import os

# Before any rank's process: a machine that somebody has tuned must not change what tests see.
os.environ["PG_SDMA_TUNING"] = "off"
