"""All-gathers over GPU copy engines, as a torch.distributed backend.

Importing this package registers the backend: `init_process_group("cpu:gloo,cuda:sdma")`. Once the
package is installed, torch imports it by itself. The C++ extension is loaded when the first group
is created.
"""

from __future__ import annotations

from pg_sdma._registration import register
from pg_sdma.stats import fast_path_share, stats, transports
from pg_sdma.trace import flight_record

__version__ = "0.1.0"
__all__ = ["__version__", "fast_path_share", "flight_record", "stats", "transports"]

register()
