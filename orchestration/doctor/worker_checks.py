"""Checks of single workers and their machines, from a cluster report. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from splitserve.orchestration.doctor.machine_checks import memlock_problem, open_files_problem, oversubscription
from splitserve.orchestration.doctor.report import Check, Problem, check, few
from splitserve.orchestration.doctor.workers import is_stale, name_of
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport
from splitserve.protocol.messages.membership import WorkerSetup

MAX_CLOCK_OFFSET_SECONDS = 1.0
MAX_REMOTE_SHARE = 0.05
PLAIN_BACKEND = "reference"


def check_clocks(report: ClusterReport) -> Check:
    offsets = {
        name_of(each): each.clock_offset_seconds for each in report.workers if each.clock_offset_seconds is not None
    }
    problems = [
        Problem(
            "clock_offset",
            f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the router's",
            "let chrony or ntpd set the clocks of both machines (`chronyc tracking`): logs and metrics don't fit "
            "together before",
        )
        for name, offset in offsets.items()
        if abs(offset) > MAX_CLOCK_OFFSET_SECONDS
    ]
    worst = max((abs(offset) for offset in offsets.values()), default=0.0)
    return check("clocks", f"within {worst:.3f} s of the router's", problems)


def check_worker_limits(report: ClusterReport) -> Check:
    problems = []
    for worker in report.workers:
        setup = worker.info.setup
        problems.append(memlock_problem(name_of(worker), setup.memlock_bytes, setup.rdma_devices, _on_host(setup)))
        problems.append(open_files_problem(name_of(worker), setup.max_open_files or None))
    limits = {worker.info.setup.memlock_bytes for worker in report.workers}
    shown = sorted("any amount" if limit is None else format_bytes(limit) for limit in limits)
    return check("worker limits", f"memlock {few(shown)}" if shown else "", filter(None, problems))


def check_worker_cores(report: ClusterReport) -> Check:
    """Check the CPU workers of each machine: their threads against the cores that they may use together."""
    machines: dict[str, list[WorkerReport]] = defaultdict(list)
    for worker in report.workers:
        if worker.info.setup.device == "cpu" and not is_stale(worker, report):
            machines[worker.info.setup.machine].append(worker)
    found, shown = [], []
    for machine, workers in machines.items():
        num_threads = sum(each.info.setup.num_threads * each.info.layout.tensor_parallel_size for each in workers)
        num_cores = cores_together([worker.info.setup for worker in workers])
        shown.append(f"{num_threads} threads on {num_cores} cores of {machine}")
        found.append(oversubscription(machine, num_threads, num_cores))
    return check("worker cores", few(shown) or "no CPU workers", filter(None, found))


def cores_together(setups: Sequence[WorkerSetup]) -> int:
    """Count the physical cores that processes of one machine may use together, from each one's own count: disjoint
    masks add up, equal masks count once."""
    union = {cpu for setup in setups for cpu in setup.cpus}
    total = sum(len(setup.cpus) for setup in setups)
    cores = sum(setup.num_cores for setup in setups)
    return round(cores * len(union) / total) if total else max((setup.num_cores for setup in setups), default=0)


def check_worker_memory(report: ClusterReport) -> Check:
    problems = [
        Problem(
            "remote_memory",
            f"{format_bytes(worker.info.setup.remote_bytes)} of {format_bytes(_on_host(worker.info.setup))} of KV "
            f"in host memory of {name_of(worker)} are on other NUMA nodes than its cores or its GPU",
            "free memory on its node, give the worker less (--kv-memory, --host-kv-memory), or choose another node "
            "(`affinity: {numa_node: N}`)",
        )
        for worker in report.workers
        if worker.info.setup.remote_bytes > MAX_REMOTE_SHARE * _on_host(worker.info.setup)
    ]
    total = sum(worker.info.setup.kv_bytes * worker.info.layout.tensor_parallel_size for worker in report.workers)
    return check("worker memory", f"{format_bytes(total)} of KV", problems)


def _on_host(setup: WorkerSetup) -> int:
    """Return the bytes of the worker's KV in host memory."""
    return setup.host_kv_bytes + (setup.kv_bytes if setup.device == "cpu" else 0)


def check_kernels(report: ClusterReport) -> Check:
    """Check the kernels' backends; on a GPU none should be the reference."""
    operations: dict[str, set[str]] = defaultdict(set)
    problems = []
    for worker in report.workers:
        for operation, backend in worker.info.setup.kernels.items():
            operations[backend].add(operation)
        plain = [name for name, backend in worker.info.setup.kernels.items() if backend == PLAIN_BACKEND]
        if plain and worker.info.setup.device.startswith("cuda"):
            problems.append(
                Problem(
                    "slow_kernels",
                    f"{name_of(worker)} runs {few(plain)} on its GPU in plain PyTorch",
                    "pip install '.[gpu]' in a clone there; the worker's log shows why a backend can't run",
                )
            )
    shown = (f"{backend}: {', '.join(sorted(names))}" for backend, names in sorted(operations.items()))
    return check("kernels", "; ".join(shown), problems)
