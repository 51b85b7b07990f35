"""What is wrong with a running cluster, as far as its router's report says. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from splitserve.cluster_report import ClusterReport, WorkerReport, WorkerState
from splitserve.messages import PeerLink, WorkerPlace
from splitserve.orchestration.doctor_machine_checks import memlock_problem, open_files_problem, oversubscription
from splitserve.orchestration.doctor_report import Check, Problem, check, few, skipped
from splitserve.orchestration.sizes import format_bytes
from splitserve.request import Role

MAX_CLOCK_OFFSET_SECONDS = 1.0
MAX_REMOTE_SHARE = 0.05
UNKNOWN_TRANSPORT = "unknown"
PLAIN_BACKEND = "reference"
_WITHIN_A_MACHINE = frozenset({"cma", "xpmem", "knem", "sysv", "posix"})
_RDMA_PREFIXES = ("rc", "dc", "ud", "gga", "srd")


def cluster_checks(report: ClusterReport, wanted_transport: str = "", secret_fits: bool | None = None) -> list[Check]:
    """``wanted_transport``: by which KV is to travel; "" for the best that there is between two workers.

    ``secret_fits``: whether the secret that is set here is the cluster's; None: none is, or membership is out of reach.
    """
    return [
        check_versions(report),
        check_workers(report),
        check_connections(report),
        check_secret(report, secret_fits),
        check_layout(report),
        check_transports(report, wanted_transport),
        check_clocks(report),
        check_worker_limits(report),
        check_worker_cores(report),
        check_worker_memory(report),
        check_kernels(report),
        check_integrity(report),
    ]


def check_versions(report: ClusterReport) -> Check:
    others = [f"{_name(each)} {each.info.place.version}" for each in report.workers if _differs(each, report.version)]
    problems = []
    if others:
        problems.append(
            Problem(
                "version_mismatch",
                f"the router is {report.version}; {few(others)}",
                "`splitserve upgrade` replaces workers one by one; a router is replaced by starting the cluster again",
            )
        )
    return check("versions", f"router {report.version} on {report.machine}", problems)


def _differs(worker: WorkerReport, version: str) -> bool:
    return bool(worker.info.place.version) and worker.info.place.version != version


# ---- who is there ----


def is_stale(worker: WorkerReport, report: ClusterReport) -> bool:
    return worker.state is WorkerState.LOST or worker.silent_seconds > report.dead_after_seconds


def check_workers(report: ClusterReport) -> Check:
    problems = []
    for worker in report.workers:
        if is_stale(worker, report):
            pid, machine = worker.info.pid, worker.info.place.machine or "its machine"
            problems.append(
                Problem(
                    "stale_worker",
                    f"{_name(worker)} is registered, but has said nothing for {worker.silent_seconds:.0f} s",
                    f"look at process {pid} on {machine}: if it is stopped or hangs, `kill -KILL {pid}` lets its "
                    "launcher start it again; if it is gone, `splitserve logs` may say why",
                )
            )
    states = [f"{_name(worker)} {'silent' if is_stale(worker, report) else worker.state}" for worker in report.workers]
    if not report.workers:
        problems.append(
            Problem("no_worker", "no worker has registered", "`splitserve status` and `splitserve logs` say why")
        )
    return check("workers", ", ".join(states), problems)


def check_connections(report: ClusterReport) -> Check:
    problems = [
        Problem(
            "unreachable_peer",
            f"the router on {report.machine} can't connect to {_name(worker)} at {worker.info.endpoint}",
            _REACH.format(address=worker.info.endpoint),
        )
        for worker in report.workers
        if worker.state is WorkerState.CONNECTING and not is_stale(worker, report)
    ]
    num_links = 0
    for sink, source, link in pairs(report):
        if link is not None and link.transport:
            num_links += 1
            continue
        why = f": {link.problem}" if link is not None else ""
        problems.append(
            Problem(
                "unreachable_peer",
                f"{_name(sink)} can't read KV from {_name(source)} at {source.info.endpoint}{why}",
                _REACH.format(address=source.info.endpoint),
            )
        )
    return check("connections", f"{num_links} pairs of decode and prefill workers", problems)


_REACH = (
    "see that {address} can be reached from there: firewall, --interface or --worker-host of the worker, "
    "UCX_NET_DEVICES for KV"
)


def pairs(report: ClusterReport) -> Iterator[tuple[WorkerReport, WorkerReport, PeerLink | None]]:
    """Each decode worker with each prefill worker that it may be told to read from, both ready, and its link."""
    ready = [worker for worker in report.workers if worker.state is WorkerState.READY and not is_stale(worker, report)]
    for sink in (worker for worker in ready if worker.info.role is Role.DECODE):
        links = {link.peer: link for link in sink.links}
        for source in (worker for worker in ready if worker.info.role is Role.PREFILL):
            yield sink, source, links.get(source.info.party.engine_id)


def check_secret(report: ClusterReport, fits: bool | None = None) -> Check:
    problems = [
        Problem(
            "secret_mismatch",
            f"{stranger.num_attempts} connections from {stranger.address} to {report.membership} didn't show the "
            f"cluster's secret, the last one {stranger.seconds_ago:.0f} s ago: most likely a worker with another one, "
            "or with none",
            f"give the processes on {stranger.address} the secret of the router on {report.machine} "
            "(--secret-file, SPLITSERVE_SECRET, or `secrets: {shared: ...}` in the spec) and start them again",
        )
        for stranger in report.strangers
    ]
    if fits is False:
        problems.append(
            Problem(
                "secret_mismatch",
                f"the secret that is set here doesn't open {report.membership}: a worker that is started here with it "
                "can't join",
                f"set the secret of the router on {report.machine} here, too (--secret-file, SPLITSERVE_SECRET); if "
                "none is configured there, it has drawn one that others can't have: configure one, and start it again",
            )
        )
    return check("secret", "side channels want one" if report.has_secret else "none is set", problems)


def check_layout(report: ClusterReport) -> Check:
    """Workers that were refused: nearly always since their KV blocks have another shape."""
    problems = []
    for refused in report.refused:
        is_layout = "layout" in refused.reason or "vocab_size" in refused.reason
        where = f" on {refused.machine}" if refused.machine else ""
        problems.append(
            Problem(
                "layout_mismatch" if is_layout else "worker_refused",
                f"worker {refused.engine_id}{where} was refused {refused.seconds_ago:.0f} s ago: {refused.reason}",
                "give all pools the same model, --dtype, --block-size and --kv-cache-dtype (the message names its own "
                "value first), then start it again"
                if is_layout
                else "end the other worker of that name, or start this one again",
            )
        )
    layouts = {worker.info.layout for worker in report.workers}
    texts = {f"{each.dtype}, {each.block_size} tokens a block" for each in layouts}
    return check("layout", ", ".join(sorted(texts)) or "none yet", problems)


# ---- how KV travels ----


def check_transports(report: ClusterReport, wanted: str) -> Check:
    known = [(sink, source, link) for sink, source, link in pairs(report) if link is not None and link.transport]
    if not known:
        return skipped("transport", "no decode worker reads from a prefill worker")
    problems = []
    for sink, source, link in known:
        problem = _transport_problem(sink, source, link, wanted)
        if problem is not None:
            problems.append(problem)
    shown = sorted({f"{link.transport} at {link.bytes_per_second / 1e9:.2f} GB/s a thread" for _, _, link in known})
    return check("transport", few(shown), problems)


def _transport_problem(sink: WorkerReport, source: WorkerReport, link: PeerLink, wanted: str) -> Problem | None:
    here, there = sink.info.place, source.info.place
    expected = wanted or expected_transport(here, there)
    if link.transport == UNKNOWN_TRANSPORT and not link.problem:
        return None  # its environment keeps UCX from telling
    if not link.problem and (not expected or is_by(link.transport, expected)):
        return None
    because = link.problem or f"{expected} is to be expected between them"
    chosen = {
        f"{_name(each)} has UCX_TLS={each.info.place.ucx_tls}" for each in (sink, source) if each.info.place.ucx_tls
    }
    advice = "run both in one PID namespace and one user (CMA also needs kernel.yama.ptrace_scope 0 or 1)"
    if expected == "cuda_ipc":
        advice = "run both in one PID namespace (--pid=host), on GPUs that reach each other (nvidia-smi topo -m)"
    elif expected == "rdma":
        advice = "let UCX_NET_DEVICES and `connector: {devices: ...}` name the RDMA devices, and see that they are up"
    if chosen:
        advice = f"{', '.join(sorted(chosen))}: unset it, or take `connector: {{transports: ...}}` out of the spec"
    return Problem(
        "wrong_transport", f"{_name(sink)} reads KV from {_name(source)} by {link.transport}; {because}", advice
    )


def expected_transport(one: WorkerPlace, other: WorkerPlace) -> str:
    """What two workers should use: a name of UCX's, ``shared memory`` or ``rdma`` for a group of them, "" for any."""
    if not one.machine or not other.machine:
        return ""
    on_gpus = one.device.startswith("cuda") and other.device.startswith("cuda")
    if one.machine == other.machine:
        return "cuda_ipc" if on_gpus else "" if "cuda" in one.device + other.device else "shared memory"
    return "rdma" if one.rdma_devices and other.rdma_devices else ""


def is_by(transport: str, expected: str) -> bool:
    """Whether the transports that UCX names, like ``rc_mlx5+cuda_ipc``, are of the expected kind."""
    names = transport.partition(" ")[0].split("+")
    if expected == "shared memory":
        return bool(_WITHIN_A_MACHINE & set(names))
    if expected == "rdma":
        return any(name.startswith(_RDMA_PREFIXES) for name in names)
    return expected in names


# ---- the workers' machines ----


def check_clocks(report: ClusterReport) -> Check:
    offsets = {
        _name(each): each.clock_offset_seconds for each in report.workers if each.clock_offset_seconds is not None
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
        problems.append(memlock_problem(_name(worker), place.memlock_bytes, place.rdma_devices, _on_host(place)))
        problems.append(open_files_problem(_name(worker), place.max_open_files or None))
    limits = {worker.info.place.memlock_bytes for worker in report.workers}
    shown = sorted("any amount" if limit is None else format_bytes(limit) for limit in limits)
    return check("worker limits", f"memlock {few(shown)}" if shown else "", filter(None, problems))


def check_worker_cores(report: ClusterReport) -> Check:
    """CPU workers of each machine: their threads against the cores that they may use together."""
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
    """Physical cores that processes of one machine may use between them, from each one's own count: masks that are
    apart add up, masks that are the same count once."""
    union = {cpu for place in places for cpu in place.cpus}
    total = sum(len(place.cpus) for place in places)
    cores = sum(place.num_cores for place in places)
    return round(cores * len(union) / total) if total else max((place.num_cores for place in places), default=0)


def check_worker_memory(report: ClusterReport) -> Check:
    problems = [
        Problem(
            "remote_memory",
            f"{format_bytes(worker.info.place.remote_bytes)} of {format_bytes(_on_host(worker.info.place))} of KV "
            f"in host memory of {_name(worker)} are on other NUMA nodes than its cores or its GPU",
            "free memory on its node, give the worker less (--kv-memory, --host-kv-memory), or choose another node "
            "(`placement: {numa_node: N}`)",
        )
        for worker in report.workers
        if worker.info.place.remote_bytes > MAX_REMOTE_SHARE * _on_host(worker.info.place)
    ]
    total = sum(worker.info.place.kv_bytes for worker in report.workers)
    return check("worker memory", f"{format_bytes(total)} of KV", problems)


def _on_host(place: WorkerPlace) -> int:
    """Bytes of KV in its machine's memory."""
    return place.host_kv_bytes + (place.kv_bytes if place.device == "cpu" else 0)


def check_kernels(report: ClusterReport) -> Check:
    """Which backends run; on a GPU none should be the plain one."""
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
                    f"{_name(worker)} runs {few(plain)} on its GPU in plain PyTorch",
                    "pip install '.[gpu]' in a clone there; the worker's log says why a backend can't run",
                )
            )
    shown = (f"{backend}: {', '.join(sorted(names))}" for backend, names in sorted(operations.items()))
    return check("kernels", "; ".join(shown), problems)


def check_integrity(report: ClusterReport) -> Check:
    found = {_name(worker): worker.load.kv_mismatches for worker in report.workers if worker.load.kv_mismatches}
    problems = [
        Problem(
            "kv_mismatch",
            f"{name} found {number} KV blocks that differ from what prefill had",
            "take the worker's machine out of the cluster and test its memory and network; keep the logs and report it",
        )
        for name, number in found.items()
    ]
    done = sum(worker.load.handovers for worker in report.workers)
    failed = sum(worker.load.handover_failures for worker in report.workers)
    return check("hand-overs", f"{done} done, {failed} failed since the workers started", problems)


def _name(worker: WorkerReport) -> str:
    return worker.info.party.engine_id
