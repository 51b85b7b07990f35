"""The diagnosis of an overview: all causes that it shows, ranked, and the first of them as a sentence. Pure.

A finding's severity estimates the share of the requests' time that its cause costs. Where one cause brings about
another (a cold prefix cache makes prefill short), the first one takes over the severity of the other.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from splitserve.protocol.reports.overview import Diagnosis, Finding, Overview
from splitserve.router.admin.diagnosis.decoding import batch_too_big, decode_kv, decode_slots
from splitserve.router.admin.diagnosis.edge import router_cpu, slow_clients
from splitserve.router.admin.diagnosis.evidence import Evidence, milliseconds, percent
from splitserve.router.admin.diagnosis.objectives import missed_objective
from splitserve.router.admin.diagnosis.prompts import cold_prefix, convoy, prefill_short
from splitserve.router.admin.diagnosis.transfers import remote_memory, slow_transport, tier_down
from splitserve.router.admin.diagnosis.workers import failures, fallback, no_worker, paused, sick_worker

MIN_SEVERITY = 0.15
"""Severity below which a cause is no bottleneck."""

CAUSES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    paused,
    no_worker,
    prefill_short,
    cold_prefix,
    convoy,
    decode_kv,
    decode_slots,
    batch_too_big,
    slow_transport,
    remote_memory,
    tier_down,
    sick_worker,
    failures,
    fallback,
    router_cpu,
    slow_clients,
    missed_objective,
)

EXPLAINS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("prefill_short", ("long_prompts", "decode_kv")),
    ("cold_prefix", ("prefill_short", "long_prompts", "decode_kv")),
    ("slow_transport", ("decode_kv", "decode_slots")),
    ("sick_worker", ("prefill_short", "long_prompts", "decode_kv", "batch_too_big", "decode_slots", "failures")),
    ("remote_memory", ("sick_worker", "prefill_short", "batch_too_big")),
    ("router_cpu", ("prefill_short", "long_prompts")),
    ("paused", ("no_worker", "prefill_short", "long_prompts", "decode_kv", "decode_slots", "missed_objective")),
)
"""Causes, the deeper ones last, with the findings that they bring about."""


def diagnose(view: Overview) -> Diagnosis:
    """Return what limits the cluster."""
    evidence = Evidence(view)
    found = [finding for cause in CAUSES for finding in cause(evidence)]
    ranked = sorted(_explained(found, evidence), key=lambda finding: -finding.severity)
    ranked = [finding for finding in ranked if finding.severity >= MIN_SEVERITY]
    if ranked:
        return Diagnosis(state="limited", sentence=ranked[0].sentence, findings=ranked)
    if not view.ttft.num and not view.router.num_in_flight:
        return Diagnosis(state="idle", sentence=f"Idle: no requests in the last {view.seconds:.0f} s.")
    return Diagnosis(state="healthy", sentence=_healthy(evidence))


def _explained(found: Iterable[Finding], evidence: Evidence) -> list[Finding]:
    """Return the findings, those that others bring about less severe than these."""
    findings = list(found)
    is_felt = any(worker.slowness > 1.3 and worker.remote_bytes for worker in evidence.workers)
    for cause, effects in EXPLAINS:
        if cause == "remote_memory" and not is_felt:
            continue
        named = [each for each in findings if each.name == cause and each.severity >= MIN_SEVERITY]
        caused = [each for each in findings if each.name in effects]
        if not named or not caused:
            continue
        most = max(each.severity for each in (*named, *caused))
        first = max(named, key=lambda each: each.severity)
        findings = [
            _with(each, most) if each is first else _with(each, 0.9 * most * each.severity) if each in caused else each
            for each in findings
        ]
    return findings


def _with(finding: Finding, severity: float) -> Finding:
    return msgspec.structs.replace(finding, severity=severity)


def _healthy(evidence: Evidence) -> str:
    """Return that nothing limits the cluster, with its load."""
    view = evidence.view
    parts = [f"time to first token {milliseconds(view.ttft.p50)} (median)"] if view.ttft.num else []
    if evidence.prefill:
        parts.append(f"{evidence.prefill[0].role} busy {percent(evidence.prefill_busy)} of the time")
    if evidence.decode:
        blocks = sum(worker.blocks for worker in evidence.decode)
        held = sum(worker.blocks_used + worker.blocks_reserved for worker in evidence.decode)
        parts.append(f"{percent(held / max(1, blocks))} of {evidence.decode[0].role}'s KV in use")
    return f"Nothing limits the cluster now: {', '.join(parts)}." if parts else "Nothing limits the cluster now."
