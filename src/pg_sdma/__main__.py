"""`python -m pg_sdma`, which is what the command `pg-sdma` calls."""

from __future__ import annotations

import sys

from pg_sdma.cli import main

if __name__ == "__main__":
    sys.exit(main())
