"""Which of torch's tests run where, and what is known to differ on sdma."""

from __future__ import annotations

import ast
import importlib.util
from typing import NamedTuple


class Difference(NamedTuple):
    message: str  # part of what the ranks print
    reason: str


_GLOO_BY_NAME = Difference(
    "monitored_barrier is only implemented for GLOO backend",
    "torch.distributed.monitored_barrier refuses every backend that is not called gloo",
)

# Pass on gloo and fail on sdma. docs/conformance.md says the same to users.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": Difference(
        "'custom' != 'sdma'",
        "DDP's log has torch's one name for all backends registered from outside, custom",
    ),
    "test_monitored_barrier_gloo": _GLOO_BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _GLOO_BY_NAME,
    "test_monitored_barrier_failure_order": _GLOO_BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _GLOO_BY_NAME,
}

# One of each operation and every all-gather: the part for the default tests.
SHORT = (
    "test_all_gather",
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_full_group",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_full_group",
    "test_all_gather_object_default_pg",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_destroy_group",
    "test_DistributedDataParallelCPU",
    "test_gather",
    "test_get_backend",
    "test_get_future",
    "test_get_rank_size_group",
    "test_isend",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_sum",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
)

# What torch runs from that many ranks only.
LARGER = {
    4: (
        "test_gather_object",
        "test_gather_object_subgroup",
        "test_new_subgroups_with_group_param",
    ),
    8: (
        "test_all_gather_coalesced_group",
        "test_all_gather_group",
        "test_all_reduce_coalesced_group_max",
        "test_all_reduce_coalesced_group_min",
        "test_all_reduce_coalesced_group_product",
        "test_all_reduce_coalesced_group_sum",
        "test_all_reduce_group_max",
        "test_all_reduce_group_min",
        "test_all_reduce_group_product",
        "test_all_reduce_group_sum",
        "test_barrier_group",
        "test_barrier_timeout_group",
        "test_broadcast_group",
        "test_gather_group",
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_wait_all_ranks",
        "test_reduce_group_max",
        "test_reduce_group_min",
        "test_reduce_group_product",
        "test_reduce_group_sum",
        "test_scatter_group",
    ),
}


def all_tests() -> list[str]:
    """The tests of this torch's DistributedTest, read off its source.

    To import it takes seconds, and settles by the environment which tests run.
    """
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    with open(spec.origin) as file:
        module = ast.parse(file.read())
    (outer,) = (
        n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "DistributedTest"
    )
    (base,) = (n for n in outer.body if isinstance(n, ast.ClassDef))
    methods = [node.name for node in base.body if isinstance(node, ast.FunctionDef)]
    return [name for name in methods if name.startswith("test_")]
