"""Checks of single workers and their machines, from a cluster report. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from splitserve.orchestration.doctor.machine_checks import memlock_problem, open_files_problem, oversubscription
from splitserve.orchestration.doctor.report import Check, Problem, check, few
from splitserve.orchestration.doctor.workers import is_stale, name_of
from splitserve.orchestration.spec.sizes import format_bytes
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport
from splitserve.protocol.messages.membership import WorkerPlace

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
        place = worker.info.place
        problems.append(memlock_problem(name_of(worker), place.memlock_bytes, place.rdma_devices, _on_host(place)))
        problems.append(open_files_problem(name_of(worker), place.max_open_files or None))
    limits = {worker.info.place.memlock_bytes for worker in report.workers}
    shown = sorted("any amount" if limit is None else format_bytes(limit) for limit in limits)
    return check("worker limits", f"memlock {few(shown)}" if shown else "", filter(None, problems))


def check_worker_cores(report: ClusterReport) -> Check:
    """Check the CPU workers of each machine: their threads against the cores that they may use together."""
    machines: dict[str, list[WorkerReport]] = defaultdict(list)
    for worker in report.workers:
        if worker.info.place.device == "cpu" and not is_stale(worker, report):
            machines[worker.info.place.machine].append(worker)
    found, shown = [], []
    for machine, workers in machines.items():
        num_threads = sum(each.info.place.num_threads * each.info.layout.tensor_parallel_size for each in workers)
        num_cores = cores_together([worker.info.place for worker in workers])
        shown.append(f"{num_threads} threads on {num_cores} cores of {machine}")
        found.append(oversubscription(machine, num_threads, num_cores))
    return check("worker cores", few(shown) or "no CPU workers", filter(None, found))


def cores_together(places: Sequence[WorkerPlace]) -> int:
    """Count the physical cores that processes of one machine may use together, from each one's own count: disjoint
    masks add up, equal masks count once."""
    union = {cpu for place in places for cpu in place.cpus}
    total = sum(len(place.cpus) for place in places)
    cores = sum(place.num_cores for place in places)
    return round(cores * len(union) / total) if total else max((place.num_cores for place in places), default=0)


def check_worker_memory(report: ClusterReport) -> Check:
    problems = [
        Problem(
            "remote_memory",
            f"{format_bytes(worker.info.place.remote_bytes)} of {format_bytes(_on_host(worker.info.place))} of KV "
            f"in host memory of {name_of(worker)} are on other NUMA nodes than its cores or its GPU",
            "free memory on its node, give the worker less (--kv-memory, --host-kv-memory), or choose another node "
            "(`placement: {numa_node: N}`)",
        )
        for worker in report.workers
        if worker.info.place.remote_bytes > MAX_REMOTE_SHARE * _on_host(worker.info.place)
    ]
    total = sum(worker.info.place.kv_bytes for worker in report.workers)
    return check("worker memory", f"{format_bytes(total)} of KV", problems)


def _on_host(place: WorkerPlace) -> int:
    """Return the bytes of the worker's KV in host memory."""
    return place.host_kv_bytes + (place.kv_bytes if place.device == "cpu" else 0)


def check_kernels(report: ClusterReport) -> Check:
    """Check the kernels' backends; on a GPU none should be the reference."""
    operations: dict[str, set[str]] = defaultdict(set)
    problems = []
    for worker in report.workers:
        for operation, backend in worker.info.place.kernels.items():
            operations[backend].add(operation)
        plain = [name for name, backend in worker.info.place.kernels.items() if backend == PLAIN_BACKEND]
        if plain and worker.info.place.device.startswith("cuda"):
            problems.append(
                Problem(
                    "slow_kernels",
                    f"{name_of(worker)} runs {few(plain)} on its GPU in plain PyTorch",
                    "pip install '.[gpu]' in a clone there; the worker's log shows why a backend can't run",
                )
            )
    shown = (f"{backend}: {', '.join(sorted(names))}" for backend, names in sorted(operations.items()))
    return check("kernels", "; ".join(shown), problems)
