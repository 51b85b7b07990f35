"""Lanes of test modules, by which pytest-xdist shares them out to processes, the longest first. Not a test module."""

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

from time_limit import TimeLimit

BESIDE_FOLDERS = {"common", "decode", "engine", "kernels", "models", "prefill", "protocol", "router", "simulation"}
"""Folders whose modules keep to about one core, and whose processes leave nothing that others could take for their own:
no UCX in the process of the tests, no LMCache. They run in any order, beside the two lanes, and give way to them."""
IN_TURN = {
    "engine/test_awake_cores",
    "router/test_hostile_bodies",
}
"""Modules of those folders that run in the lane of all others nevertheless: they measure what cores do, or how long a
stream waits, which a lower priority would lengthen."""
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
    "end_to_end/test_late_grants",
    "end_to_end/test_prefix_reads",
    "benchmarks/test_tiers",
    "benchmarks/test_soak",
    "benchmarks/test_placement_turns",
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
    "models/test_families": 49,
    "simulation/test_tiers": 42,
    "benchmarks/test_http_attacks": 33,
    "simulation/test_simulation": 31,
    "models/test_add_a_model_family": 28,
    "simulation/test_storm": 25,
    "kernels/test_triton": 22,
    "router/test_faults": 22,
    "project/test_gpu_tests": 21,
    "orchestration/test_launcher": 20,
    "benchmarks/test_tune": 19,
    "models/test_transformers_backend": 19,
    "kernels/experts/test_triton_experts": 17,
    "simulation/test_host_offers": 17,
    "kernels/test_compiled_kernels": 15,
    "simulation/test_cache_groups": 15,
    "simulation/test_planted_bugs": 15,
    "worker/test_window_groups": 15,
    "models/test_reading": 14,
    "router/test_fuzz_http": 13,
    "simulation/test_replay": 13,
    "models/test_hostile_checkpoints": 12,
    "models/test_loading_memory": 12,
    "models/test_runner": 12,
    "router/test_http_connections": 12,
    "router/test_word_process": 12,
    "simulation/test_prefix_reads": 12,
    "worker/test_ranks": 12,
    "kernels/test_all_reduce": 11,
    "simulation/test_twin_routes": 11,
    "benchmarks/test_tensor_parallel": 10,
    "models/sampling/test_add_a_sampling_feature": 10,
    "orchestration/test_control": 9,
    "orchestration/test_forking": 9,
    "router/test_last_worker": 9,
    "simulation/test_routers": 9,
    "router/tracing/test_export": 8,
    "kernels/test_all_gather": 7,
    "kernels/test_thresholds": 7,
    "kernels/test_triton_chunks": 7,
    "orchestration/test_cli_errors": 7,
    "project/test_ci_run": 7,
    "router/test_membership_connections": 7,
    "simulation/test_logprobs": 7,
    "models/test_mixed_steps": 6,
    "project/test_docs": 6,
    "router/test_other_apis": 6,
    "simulation/test_twin": 6,
    "kernels/test_sinks": 5,
    "kvconnector/test_gated_loads": 5,
    "models/test_demo": 5,
    "models/test_precision": 5,
    "orchestration/test_hub": 5,
    "orchestration/test_python_types": 5,
    "protocol/test_specification": 5,
    "router/test_request_state": 5,
    "router/test_token_memories": 5,
    "simulation/test_choices": 5,
    "simulation/test_late_grants": 5,
    "simulation/test_policies": 5,
    "benchmarks/test_arguments": 4,
    "benchmarks/test_client_limits": 4,
    "common/test_collector": 4,
    "models/test_triton_families": 4,
    "project/test_deploy": 4,
    "project/test_long_tests": 4,
    "simulation/test_planted_in_random_schedules": 4,
    "models/sampling/test_distributions": 3,
    "models/sampling/test_features": 3,
    "orchestration/test_cluster_spec": 3,
    "project/test_packaging": 3,
    "project/test_sdist": 3,
    "router/test_add_a_routing_policy": 3,
    "router/test_bounds_and_ends": 3,
    "router/test_request_queue": 3,
    "router/test_returning_workers": 3,
    "simulation/test_planted_router_bugs": 3,
    "benchmarks/goodput/test_goodput_arithmetic": 2,
    "benchmarks/test_arithmetic": 2,
    "engine/test_feature_states": 2,
    "engine/test_fuzz_messages": 2,
    "engine/test_loop": 2,
    "engine/test_mixed_scheduling": 2,
    "engine/test_sockets": 2,
    "engine/test_step_fit": 2,
    "kernels/test_attention_backends": 2,
    "kernels/test_gather": 2,
    "kernels/test_latent_attention": 2,
    "kernels/test_triton_odd_shapes": 2,
    "kernels/test_tuning": 2,
    "kvconnector/test_block_pool": 2,
    "kvconnector/test_tiers": 2,
    "models/experts/test_mxfp4": 2,
    "orchestration/test_cli": 2,
    "protocol/test_wire": 2,
    "router/admin/test_overview": 2,
    "router/test_forced_calls": 2,
    "router/test_next_turns": 2,
    "router/test_placement": 2,
    "router/test_request_logs": 2,
    "router/test_sent_blocks": 2,
    "simulation/test_operations": 2,
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
    """Scheduling by lanes. A process begins with the longest one that is left; from a quarter of a run's time limit on
    with the shortest, so that as many tests as possible are made on a machine that is too slow for all."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)

    def _assign_work_unit(self, node: object) -> None:
        limit: TimeLimit = next(each for each in self.config.pluginmanager.get_plugins() if isinstance(each, TimeLimit))
        next_lane = (min if limit.is_over(share=0.25) else max)(self.workqueue, key=seconds_of)
        self.workqueue.move_to_end(next_lane, last=False)
        super()._assign_work_unit(node)
