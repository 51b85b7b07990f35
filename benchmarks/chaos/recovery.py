"""Stalls of streams after a fault of one of their workers. Pure."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from splitserve.benchmarks.chaos.faults import Fault, FaultKind
from splitserve.benchmarks.chaos.load import Answer

LATE_ARRIVAL_SECONDS = 0.25  # tokens sent before the kill may still arrive for so long


def stall_seconds(answer: Answer, fault: Fault) -> float | None:
    """Return the seconds from the fault to the end of the gap that it caused in the answer's tokens; None if it didn't
    affect this request.

    None, too, if other faults affected it: a stream that a kill sends to a worker that is frozen, but not yet known to
    be, waits for that.

    Tokens sent before the worker died arrive after its death, so the gap is the longest one of those that begin no
    later than ``LATE_ARRIVAL_SECONDS`` after it.
    """
    if not answer.sent_at < fault.at < answer.ended_at:
        return None
    if {attempt.worker for attempt in answer.failed_attempts} != {fault.worker}:
        return None
    times = [answer.sent_at, *answer.arrivals]
    gaps = [
        (late - early, late)
        for early, late in itertools.pairwise(times)
        if late > fault.at and early <= fault.at + LATE_ARRIVAL_SECONDS
    ]
    return max(gaps)[1] - fault.at if gaps else None


def recovery(answers: Sequence[Answer], faults: Sequence[Fault]) -> dict[str, dict[str, Any]]:
    """Compute the milliseconds from a fault to the next token of its requests, by kind of fault and role of the worker.

    For a frozen worker they count from its freeze, and include the time to detect it.
    """
    found: dict[str, list[float]] = {}
    for fault in faults:
        stalls = [stall for answer in answers if (stall := stall_seconds(answer, fault)) is not None]
        found.setdefault(f"{fault.kind.value} {fault.role}", []).extend(stalls)
    return {
        name: {
            "faults": sum(f"{fault.kind.value} {fault.role}" == name for fault in faults),
            "requests": len(stalls),
            **({f"p{p}_ms": float(np.percentile(stalls, p)) * 1e3 for p in (50, 99)} if stalls else {}),
        }
        for name, stalls in sorted(found.items())
    }


def worst_stalls(answers: Sequence[Answer], faults: Sequence[Fault], count: int) -> list[dict[str, Any]]:
    """Return the requests with the longest stalls after kills, with their history."""
    stalls: list[dict[str, Any]] = [
        {
            "seconds": round(stall, 3),
            "fault": f"{fault.kind.value} {fault.worker}",
            "time": fault.wall_time,
            "case": answer.case,
            "tokens_before": sum(arrival <= fault.at for arrival in answer.arrivals),
            "failed_attempts": [f"{attempt.worker} {attempt.reason}" for attempt in answer.failed_attempts],
        }
        for fault in faults
        if fault.kind is FaultKind.KILL
        for answer in answers
        if (stall := stall_seconds(answer, fault)) is not None
    ]
    return sorted(stalls, key=lambda stall: stall["seconds"], reverse=True)[:count]


def p99_seconds(answers: Sequence[Answer], faults: Sequence[Fault], kind: FaultKind, role: str) -> float | None:
    """Return the 99th percentile after such faults of workers of ``role``; None if they affected no request."""
    figures = recovery(answers, faults).get(f"{kind.value} {role}", {})
    return figures["p99_ms"] / 1e3 if "p99_ms" in figures else None
