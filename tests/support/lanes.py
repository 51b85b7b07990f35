"""How pytest-xdist shares the tests out to two processes. Not a test module."""

from xdist.scheduler import LoadScopeScheduling

BESIDE_OTHERS = {
    "kernels/test_all_reduce",
    "kernels/test_attention_backends",
    "benchmarks/test_tensor_parallel",
    "kvconnector/test_block_pool",
    "project/test_ci_run",
    "orchestration/test_cluster_spec",
    "orchestration/test_control",
    "project/test_deploy",
    "router/test_fuzz_http",
    "project/test_gpu_tests",
    "simulation/test_host_offers",
    "benchmarks/test_http_attacks",
    "router/test_http_connections",
    "models/test_hostile_checkpoints",
    "kernels/test_gather",
    "kernels/test_sampling",
    "kernels/test_triton",
    "orchestration/test_launcher",
    "router/test_local_origin",
    "router/test_membership_connections",
    "models/sampling/test_add_a_sampling_feature",
    "models/sampling/test_distributions",
    "models/test_mixed_steps",
    "models/test_precision",
    "models/test_reading",
    "models/test_runner",
    "simulation/test_planted_bugs",
    "simulation/test_planted_in_random_schedules",
    "simulation/test_planted_router_bugs",
    "worker/test_ranks",
    "router/test_faults",
    "router/test_http",
    "router/test_last_worker",
    "simulation/test_simulation",
    "protocol/test_specification",
    "simulation/test_tiers",
    "kernels/test_triton_chunks",
    "kernels/test_triton_odd_shapes",
    "benchmarks/test_tune",
    "worker/test_start",
}
"""Modules that take a while and keep to about one core, and whose processes leave nothing that others could take for
their own: no UCX in the process of the tests, no LMCache."""
ON_RAY = {"end_to_end/test_cluster_ray", "orchestration/test_ray_head"}
"""Likewise, but one after the other."""


class Lanes(LoadScopeScheduling):
    """All other modules run one after another in one process, these in the other."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition(".py")[0].removeprefix("tests/")
        if module in ON_RAY:
            return "on Ray"
        return module if module in BESIDE_OTHERS else "one after another"
