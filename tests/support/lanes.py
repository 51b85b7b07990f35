"""Lanes of test modules, by which pytest-xdist shares them out to processes, the longest first. Not a test module."""

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

BESIDE_OTHERS = {
    "kernels/test_all_reduce",
    "kernels/test_attention_backends",
    "benchmarks/test_tensor_parallel",
    "kvconnector/test_block_pool",
    "project/test_ci_run",
    "orchestration/test_affinity",
    "orchestration/test_cluster_spec",
    "orchestration/test_control",
    "project/test_deploy",
    "router/test_fuzz_http",
    "router/test_response_templates",
    "project/test_gpu_tests",
    "simulation/test_cache_groups",
    "simulation/test_host_offers",
    "benchmarks/test_http_attacks",
    "router/test_http_connections",
    "models/test_hostile_checkpoints",
    "kernels/test_gather",
    "kernels/test_sampling",
    "kernels/test_sinks",
    "kernels/test_thresholds",
    "kernels/test_triton",
    "orchestration/test_forking",
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
    "router/test_bounds_and_ends",
    "router/test_faults",
    "router/test_http",
    "router/test_worker_mixes",
    "router/test_last_worker",
    "simulation/test_simulation",
    "simulation/test_storm",
    "protocol/test_specification",
    "simulation/test_logprobs",
    "simulation/test_tiers",
    "kernels/test_triton_chunks",
    "kernels/test_triton_odd_shapes",
    "benchmarks/test_tune",
    "worker/test_start",
    "worker/test_window_groups",
    "kernels/test_all_gather",
    "kernels/test_tuning",
    "router/test_hostile_bodies",
    "router/test_placement",
    "router/test_add_a_routing_policy",
    "models/test_add_a_model_family",
    "models/test_families",
    "models/experts/test_mxfp4",
    "models/test_demo",
    "models/test_loader",
    "models/test_fp8",
    "models/test_fp8_kv",
    "simulation/test_planted_core_bugs",
    "engine/test_fuzz_messages",
    "engine/test_gated_steps",
    "kvconnector/test_gated_loads",
    "orchestration/test_cli_errors",
    "orchestration/test_cli",
    "orchestration/test_python_types",
    "orchestration/test_topology",
    "orchestration/test_doctor_checks",
    "project/test_docs",
    "project/test_sdist",
    "project/test_long_tests",
    "router/test_core",
    "router/test_returning_workers",
    "router/test_text",
    "models/sampling/test_features",
    "router/test_request_state",
    "router/test_schema",
    "kvconnector/test_gated_copies",
}
"""Modules that keep to about one core, and whose processes leave nothing that others could take for their own: no UCX
in the process of the tests, no LMCache. They run in any order, beside the two lanes, and give way to them."""
ON_CLUSTERS = {
    "end_to_end/test_cluster_ray",
    "orchestration/test_ray_head",
    "end_to_end/test_cluster_local",
    "end_to_end/test_end_to_end",
    "end_to_end/test_logprobs",
    "end_to_end/test_tiers",
    "end_to_end/test_fuzz_sockets",
    "end_to_end/test_tensor_parallel",
    "end_to_end/test_windows",
    "end_to_end/test_cli_serve",
    "end_to_end/test_python",
    "end_to_end/test_quickstart",
    "end_to_end/test_host_offers",
    "benchmarks/test_tiers",
    "benchmarks/test_soak",
    "engine/test_profile",
    "orchestration/test_cluster_network",
    "common/test_security",
    "worker/test_lost_device",
    "kvconnector/test_add_a_cache_tier",
    "kvconnector/test_kv_events",
    "kvconnector/test_ranked_copies",
}
"""Likewise, but with clusters of several processes: one module after another, so that there are never too many."""
SECONDS = {
    "router/test_faults": 50,
    "simulation/test_simulation": 50,
    "simulation/test_tiers": 35,
    "orchestration/test_launcher": 27,
    "router/test_http_connections": 26,
    "simulation/test_planted_bugs": 25,
    "kernels/test_triton": 20,
    "models/test_hostile_checkpoints": 18,
    "router/test_last_worker": 18,
    "worker/test_ranks": 18,
    "simulation/test_host_offers": 16,
    "simulation/test_logprobs": 10,
    "kernels/test_all_reduce": 15,
    "benchmarks/test_http_attacks": 14,
    "protocol/test_specification": 13,
    "models/test_add_a_model_family": 20,
    "simulation/test_planted_in_random_schedules": 12,
    "router/test_hostile_bodies": 11,
    "project/test_gpu_tests": 11,
    "models/test_reading": 11,
    "benchmarks/test_tune": 10,
    "router/test_membership_connections": 10,
    "orchestration/test_control": 10,
    "kernels/test_triton_chunks": 9,
    "kernels/test_all_gather": 9,
    "models/test_runner": 8,
    "benchmarks/test_tensor_parallel": 7,
    "router/test_http": 6,
    "simulation/test_planted_router_bugs": 6,
    "orchestration/test_cluster_spec": 6,
    "models/test_mixed_steps": 6,
    "kernels/test_gather": 6,
    "router/test_fuzz_http": 6,
    "orchestration/test_cli_errors": 6,
    "kvconnector/test_gated_loads": 6,
    "project/test_long_tests": 5,
    "models/test_precision": 4,
    "project/test_ci_run": 4,
    "models/test_families": 30,
    "kernels/test_sampling": 4,
}
"""Seconds that modules beside the lanes take, as ``.ci/run`` measured them: the longest ones begin first, so that no
process works alone at the end. A module without an entry is short."""
ALONE = "one after another"
CLUSTERS = "on clusters"
NICENESS = 5


def lane_of(node_id: str) -> str:
    """Return the lane of a test, or the module that is a lane of its own."""
    module = node_id.partition(".py")[0].removeprefix("tests/")
    if module in ON_CLUSTERS:
        return CLUSTERS
    return module if module in BESIDE_OTHERS else ALONE


def seconds_of(lane: str) -> float:
    """Return how long a lane takes, roughly; the two lanes of many modules count as longer than all others."""
    return {ALONE: 10_000, CLUSTERS: 5_000}.get(lane) or SECONDS.get(lane, 1)


def give_way(item: pytest.Item) -> None:
    """Lower the priority of this process of pytest-xdist before its first test beside the lanes.

    The lanes are the longest sequences of tests, and wait a lot; other tests fill the time in which they wait.
    """
    if hasattr(item.config, "workerinput") and lane_of(item.nodeid) not in (ALONE, CLUSTERS) and not _gave_way:
        os.nice(NICENESS)
        _gave_way.append(item.nodeid)


_gave_way: list[str] = []


class Lanes(LoadScopeScheduling):
    """Scheduling by lanes. A process begins with the longest one that is left."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)

    def _assign_work_unit(self, node: object) -> None:
        self.workqueue.move_to_end(max(self.workqueue, key=seconds_of), last=False)
        super()._assign_work_unit(node)
