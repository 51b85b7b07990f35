"""Lanes of test modules, by which pytest-xdist shares them out to processes, the longest first. Not a test module."""

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

BESIDE_FOLDERS = {"common", "decode", "engine", "kernels", "models", "prefill", "protocol", "router", "simulation"}
"""Folders whose modules keep to about one core, and whose processes leave nothing that others could take for their own:
no UCX in the process of the tests, no LMCache. They run in any order, beside the two lanes, and give way to them."""
IN_TURN = {
    "engine/test_awake_cores",
}
"""Modules of those folders that run in the lane of all others nevertheless: they measure what cores do."""
BESIDE_OTHERS = {
    "router/admin/test_dashboard",
    "router/admin/test_grafana",
    "router/admin/test_diagnosis",
    "orchestration/test_top",
    "benchmarks/goodput/test_goodput_arithmetic",
    "workloads/test_workloads",
    "benchmarks/test_client_limits",
    "benchmarks/test_arguments",
    "benchmarks/test_arithmetic",
    "benchmarks/test_http_attacks",
    "benchmarks/test_recovery_times",
    "benchmarks/test_report",
    "benchmarks/test_results_tables",
    "benchmarks/test_sampling_costs",
    "benchmarks/test_tensor_parallel",
    "benchmarks/test_tune",
    "kvconnector/test_block_pool",
    "kvconnector/test_gated_copies",
    "kvconnector/test_gated_loads",
    "kvconnector/test_gather",
    "kvconnector/test_golden_layout",
    "kvconnector/test_kv_memory",
    "kvconnector/test_tier_copies",
    "kvconnector/test_tiers",
    "orchestration/test_addresses",
    "orchestration/test_affinity",
    "orchestration/test_cli",
    "orchestration/test_cli_errors",
    "orchestration/test_models_command",
    "orchestration/test_cluster_spec",
    "orchestration/test_control",
    "orchestration/test_doctor_checks",
    "orchestration/test_forking",
    "orchestration/test_gpus",
    "orchestration/test_hub",
    "orchestration/test_launcher",
    "orchestration/test_log_files",
    "orchestration/test_python_batch",
    "orchestration/test_python_keywords",
    "orchestration/test_python_types",
    "orchestration/test_ray_placement",
    "orchestration/test_sizes",
    "orchestration/test_supervision",
    "orchestration/test_topology",
    "orchestration/test_upgrades",
    "project/test_ci_run",
    "project/test_deploy",
    "project/test_docs",
    "project/test_gpu_tests",
    "project/test_long_tests",
    "project/test_packaging",
    "project/test_reference_pages",
    "project/test_sdist",
    "project/test_transfers_know_bytes",
    "worker/test_ranks",
    "worker/test_start",
    "worker/test_window_groups",
}
"""Such modules of other folders."""
ON_CLUSTERS = {
    "benchmarks/twin/test_twin_commands",
    "benchmarks/twin/test_twin_bench",
    "benchmarks/goodput/test_goodput_run",
    "end_to_end/test_cluster_ray",
    "orchestration/test_ray_head",
    "end_to_end/test_cluster_local",
    "end_to_end/test_end_to_end",
    "end_to_end/test_logprobs",
    "end_to_end/test_tiers",
    "end_to_end/test_fuzz_sockets",
    "end_to_end/test_tensor_parallel",
    "end_to_end/test_model_kinds",
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
    "router/test_faults": 30,
    "simulation/test_simulation": 14,
    "simulation/test_tiers": 13,
    "orchestration/test_launcher": 27,
    "router/test_http_connections": 26,
    "simulation/test_planted_bugs": 5,
    "kernels/test_triton": 9,
    "models/test_hostile_checkpoints": 18,
    "router/test_last_worker": 15,
    "worker/test_ranks": 18,
    "simulation/test_host_offers": 8,
    "simulation/test_logprobs": 6,
    "kernels/test_all_reduce": 12,
    "benchmarks/test_http_attacks": 14,
    "protocol/test_specification": 4,
    "models/test_add_a_model_family": 20,
    "simulation/test_planted_in_random_schedules": 2,
    "router/test_hostile_bodies": 11,
    "project/test_gpu_tests": 11,
    "models/test_reading": 11,
    "benchmarks/test_tune": 10,
    "router/test_membership_connections": 10,
    "orchestration/test_control": 10,
    "kernels/test_triton_chunks": 4,
    "kernels/test_all_gather": 9,
    "models/test_runner": 8,
    "benchmarks/test_tensor_parallel": 7,
    "router/test_http": 6,
    "simulation/test_planted_router_bugs": 6,
    "orchestration/test_cluster_spec": 6,
    "models/test_mixed_steps": 4,
    "kernels/test_gather": 2,
    "router/test_fuzz_http": 6,
    "orchestration/test_cli_errors": 6,
    "kvconnector/test_gated_loads": 5,
    "project/test_long_tests": 5,
    "models/test_precision": 3,
    "project/test_ci_run": 4,
    "models/test_families": 30,
    "models/test_transformers_backend": 30,
    "models/test_transformers_model": 8,
    "kernels/test_sampling": 4,
    "kernels/test_sinks": 3,
    "kernels/test_thresholds": 6,
    "simulation/test_cache_groups": 6,
    "simulation/test_storm": 14,
    "kernels/test_compiled_kernels": 10,
    "kernels/experts/test_triton_experts": 10,
    "models/test_triton_families": 5,
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
    is_beside = module in BESIDE_OTHERS or (module.partition("/")[0] in BESIDE_FOLDERS and module not in IN_TURN)
    return module if is_beside else ALONE


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
