"""How pytest-xdist shares the tests out to two processes. Not a test module."""

from xdist.scheduler import LoadScopeScheduling

BESIDE_OTHERS = {
    "test_all_reduce_kernel",
    "test_attention_backends",
    "test_bench_tensor_parallel",
    "test_block_pool",
    "test_ci_run",
    "test_cluster_spec",
    "test_control",
    "test_deploy",
    "test_fuzz_http",
    "test_gpu_tests",
    "test_host_offers_simulation",
    "test_http_attacks",
    "test_http_connections",
    "test_hostile_checkpoints",
    "test_kernels_gather",
    "test_kernels_sampling",
    "test_kernels_triton",
    "test_launcher",
    "test_local_origin",
    "test_membership_connections",
    "test_mixed_steps",
    "test_model_precision",
    "test_model_reading",
    "test_model_runner",
    "test_planted_bugs",
    "test_planted_in_random_schedules",
    "test_planted_router_bugs",
    "test_ranks",
    "test_router_faults",
    "test_router_http",
    "test_router_last_worker",
    "test_simulation",
    "test_specification",
    "test_tiers_simulation",
    "test_triton_chunks",
    "test_triton_odd_shapes",
    "test_tune",
    "test_worker_start",
}
"""Modules that take a while and keep to about one core, and whose processes leave nothing that others could take for
their own: no UCX in the process of the tests, no LMCache."""
ON_RAY = {"test_cluster_ray", "test_ray_head"}
"""Likewise, but one after the other."""


class Lanes(LoadScopeScheduling):
    """All other modules run one after another in one process, these in the other."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition(".py")[0].rpartition("/")[2]
        if module in ON_RAY:
            return "on Ray"
        return module if module in BESIDE_OTHERS else "one after another"
