"""Causes in memory and transfers of KV: a slow transport, memory of another NUMA node, a tier that is down. Pure."""

from collections.abc import Iterator

from splitserve.protocol.reports.overview import Finding, TransportFigures
from splitserve.router.admin.diagnosis.evidence import (
    MIN_LOST_SECONDS,
    Evidence,
    finding,
    milliseconds,
    percent,
    rate,
)

MIN_TRANSFER_SHARE = 0.2
MIN_HANDOVERS = 10  # the first ones of a link also wait for it to be joined, and each choice of a request counts
MAX_REMOTE_SHARE = 0.05
WRONG_TRANSPORT = 0.2
REMOTE_MEMORY = 0.2
TIER_DOWN = 0.15
NOTICEABLY_SLOW = 1.3


def slow_transport(evidence: Evidence) -> Iterator[Finding]:
    """KV travels by another transport than it should, or takes long on the right one."""
    for transport in evidence.view.transports:
        exposed = transport.exposed.mean
        lost = exposed / (exposed + evidence.view.ttft.mean) if exposed else 0.0
        is_slow = transport.num >= MIN_HANDOVERS and exposed >= MIN_LOST_SECONDS and lost >= MIN_TRANSFER_SHARE
        if transport.problem or is_slow:
            yield _slow(transport, max(lost, WRONG_TRANSPORT if transport.problem else 0.0))


def _slow(transport: TransportFigures, severity: float) -> Finding:
    took = (
        f": a hand-over takes {milliseconds(transport.exposed.p50)} (p99 {milliseconds(transport.exposed.p99)}) after "
        "the prompt is computed"
        if transport.num
        else ""
    )
    return finding(
        "slow_transport",
        severity,
        f"KV travels slowly, by {transport.transport}{took}.",
        [
            transport.problem,
            f"reads run at {rate(transport.read_bytes_per_second)}, a thread's large read on the link at "
            f"{rate(transport.link_bytes_per_second)}"
            if transport.num
            else "",
        ],
        "`splitserve doctor --against URL` says what keeps UCX from the fast transport: UCX_TLS, PID namespaces, RDMA "
        "devices; see docs/guides/troubleshooting.md.",
    )


def remote_memory(evidence: Evidence) -> Iterator[Finding]:
    """KV memory lies on another NUMA node than the cores or the GPU that use it."""
    found = [
        worker
        for worker in evidence.workers
        if worker.kv_bytes and worker.remote_bytes > MAX_REMOTE_SHARE * worker.kv_bytes
    ]
    if not found:
        return
    worst = max(found, key=lambda worker: worker.remote_bytes / worker.kv_bytes)
    share = worst.remote_bytes / worst.kv_bytes
    slowness = max(worker.slowness for worker in found)
    is_felt = slowness >= NOTICEABLY_SLOW
    yield finding(
        "remote_memory",
        max(REMOTE_MEMORY, 1 - 1 / slowness if is_felt else 0.0),
        f"{percent(share)} of the KV memory of {worst.engine_id} is on another NUMA node than its cores or its GPU.",
        [
            f"{len(found)} of {len(evidence.workers)} workers have more than {percent(MAX_REMOTE_SHARE)} there",
            f"its steps take {slowness:.1f} times as long as those of the other {worst.role} workers"
            if is_felt
            else "",
        ],
        "Free memory on its node, give the worker less (--kv-memory, --host-kv-memory), or choose another node "
        "(`affinity: {numa_node: N}`).",
    )


def tier_down(evidence: Evidence) -> Iterator[Finding]:
    """A tier's server does not answer."""
    found = [(worker.engine_id, tier) for worker in evidence.workers for tier in worker.tiers_down]
    if found:
        name, tier = found[0]
        yield finding(
            "tier_down",
            TIER_DOWN,
            f"The tier {tier} does not answer to {len(found)} of {len(evidence.workers)} workers: what it keeps is "
            "computed again.",
            [f"{name} sees it as down"],
            "See its server's lines in `splitserve logs`; one that the cluster did not start has to be started again.",
        )
