"""What torch calls at the end of `import torch`, through the entry point group `torch.backends`.

A module of its own, outside the package: an error in `import pg_sdma` (another backend called
"sdma", say) must reach whoever imports pg_sdma, but must never take `import torch` down.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Registers the backend name "sdma"; warns, and never raises, where that fails."""
    try:
        import pg_sdma  # noqa: F401 - the import registers the name
    except Exception as error:
        warnings.warn(
            f"the torch.distributed backend 'sdma' is not available: {error}", stacklevel=2
        )
