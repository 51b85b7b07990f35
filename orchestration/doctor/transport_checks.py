"""Checks of the transports between workers, from a cluster report. Pure."""

from splitserve.orchestration.doctor.report import Check, Problem, check, few, skipped
from splitserve.orchestration.doctor.workers import name_of, pairs
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.transports import UNKNOWN_TRANSPORT, expected_transport, is_by


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
    here, there = sink.info.setup, source.info.setup
    expected = wanted or expected_transport(here, there)
    if link.transport == UNKNOWN_TRANSPORT and not link.problem:
        return None  # UCX's environment keeps it from reporting the transport
    if not link.problem and (not expected or is_by(link.transport, expected)):
        return None
    because = link.problem or f"{expected} is expected between them"
    chosen = {
        f"{name_of(each)} has UCX_TLS={each.info.setup.ucx_tls}" for each in (sink, source) if each.info.setup.ucx_tls
    }
    advice = "run both in one PID namespace and one user (CMA also needs kernel.yama.ptrace_scope 0 or 1)"
    if expected == "cuda_ipc":
        advice = "run both in one PID namespace (--pid=host), on GPUs that reach each other (nvidia-smi topo -m)"
    elif expected == "rdma":
        advice = "let UCX_NET_DEVICES and `connector: {devices: ...}` name the RDMA devices, and see that they are up"
    if chosen:
        advice = f"{', '.join(sorted(chosen))}: unset it, or take `connector: {{transports: ...}}` out of the spec"
    return Problem(
        "wrong_transport", f"{name_of(sink)} reads KV from {name_of(source)} by {link.transport}; {because}", advice
    )
