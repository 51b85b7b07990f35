"""Checks of a running cluster, from its router's report. Pure."""

from splitserve.orchestration.doctor.report import Check, Problem, check, few
from splitserve.orchestration.doctor.transport_checks import check_transports
from splitserve.orchestration.doctor.worker_checks import (
    check_clocks,
    check_kernels,
    check_worker_cores,
    check_worker_limits,
    check_worker_memory,
)
from splitserve.orchestration.doctor.workers import is_stale, name_of, pairs
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport, WorkerState


def cluster_checks(report: ClusterReport, wanted_transport: str = "", secret_fits: bool | None = None) -> list[Check]:
    """Return all checks of a cluster.

    ``wanted_transport``: the transport expected for KV; "" for the fastest between two workers. ``secret_fits``:
    whether the secret that is set here is the cluster's; None if none is set or membership is out of reach.
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
    others = [f"{name_of(each)} {each.info.setup.version}" for each in report.workers if _differs(each, report.version)]
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
    return bool(worker.info.setup.version) and worker.info.setup.version != version


# ---- workers and connections ----


def check_workers(report: ClusterReport) -> Check:
    problems = []
    for worker in report.workers:
        if is_stale(worker, report):
            pid, machine = worker.info.pid, worker.info.setup.machine or "its machine"
            problems.append(
                Problem(
                    "stale_worker",
                    f"{name_of(worker)} is registered, but has sent nothing for {worker.silent_seconds:.0f} s",
                    f"check process {pid} on {machine}: if it is stopped or hangs, `kill -KILL {pid}` lets its "
                    "launcher start it again; if it is gone, `splitserve logs` may show why",
                )
            )
    states = [
        f"{name_of(worker)} {'silent' if is_stale(worker, report) else worker.state}" for worker in report.workers
    ]
    if not report.workers:
        problems.append(
            Problem("no_worker", "no worker has registered", "see `splitserve status` and `splitserve logs`")
        )
    return check("workers", ", ".join(states), problems)


def check_connections(report: ClusterReport) -> Check:
    problems = [
        Problem(
            "unreachable_peer",
            f"the router on {report.machine} can't connect to {name_of(worker)} at {worker.info.endpoint}",
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
                f"{name_of(sink)} can't read KV from {name_of(source)} at {source.info.endpoint}{why}",
                _REACH.format(address=source.info.endpoint),
            )
        )
    return check("connections", f"{num_links} pairs of decode and prefill workers", problems)


_REACH = (
    "see that {address} can be reached from there: firewall, --interface or --worker-host of the worker, "
    "UCX_NET_DEVICES for KV"
)


def check_secret(report: ClusterReport, fits: bool | None = None) -> Check:
    problems = [
        Problem(
            "secret_mismatch",
            f"{stranger.num_attempts} connections from {stranger.address} to {report.membership} didn't present the "
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
                "none is configured there, it has generated one of its own: configure one and start it again",
            )
        )
    return check("secret", "side channels require one" if report.has_secret else "none is set", problems)


def check_layout(report: ClusterReport) -> Check:
    """Check for rejected workers: nearly always the shape of their KV blocks differs from the cluster's."""
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


def check_integrity(report: ClusterReport) -> Check:
    found = {name_of(worker): worker.load.kv_mismatches for worker in report.workers if worker.load.kv_mismatches}
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
