"""Causes in workers: all are paused, none is ready, one is slow or fails, requests fail or fall back. Pure."""

from collections.abc import Iterator

from splitserve.protocol.reports.overview import Finding, WorkerFigures
from splitserve.router.admin.diagnosis.evidence import MIN_REQUESTS, Evidence, finding, milliseconds, percent

SLOW_FACTOR = 2.0
MIN_FAILURES = 3
MIN_FAILED_SHARE = 0.05
MIN_FALLBACK_SHARE = 0.2
OPEN_BREAKER = 0.6
HARMLESS = ("cached_on_decode", "ended_with_first_token", "ended_with_second_token")
"""Reasons of a local path that are no fallback."""


def paused(evidence: Evidence) -> Iterator[Finding]:
    """Operators have paused the server."""
    router = evidence.view.router
    if not router.pause_mode:
        return
    waiting = router.num_waiting + router.num_queued
    yield finding(
        "paused",
        1.0,
        f"An operator has paused the server (mode {router.pause_mode}): no new request has begun for "
        f"{milliseconds(router.paused_seconds)}.",
        [f"{waiting} requests wait for the end of the pause" if waiting else ""],
        "`splitserve resume` ends the pause.",
    )


def no_worker(evidence: Evidence) -> Iterator[Finding]:
    """A role has no worker: nothing is served, or decode workers compute prompts themselves."""
    router = evidence.view.router
    if not router.not_ready_reason:
        return
    states = [f"{worker.engine_id} is {worker.state}" for worker in evidence.view.workers if worker.state != "ready"]
    yield finding(
        "no_worker",
        1.0,
        f"{'Placement is restricted' if router.is_ready else 'No request can be served'}: {router.not_ready_reason}.",
        [*states[:5], f"{router.num_waiting} requests wait for a worker" if router.num_waiting else ""],
        "See `splitserve status` and `splitserve logs`.",
    )


def sick_worker(evidence: Evidence) -> Iterator[Finding]:
    """One worker is much slower than the others of its role, or fails."""
    for worker in evidence.workers:
        is_slow = worker.slowness >= SLOW_FACTOR
        if not (is_slow or worker.breaker == "open" or worker.num_failures >= MIN_FAILURES):
            continue
        yield _sick(worker, is_slow=is_slow)


def _sick(worker: WorkerFigures, *, is_slow: bool) -> Finding:
    loss = 1 - 1 / worker.slowness if is_slow else 0.0
    name = worker.engine_id
    if is_slow:
        sentence = (
            f"{name} is sick: it takes {worker.slowness:.1f} times as long for its work as the other {worker.role} "
            "workers."
        )
    else:
        sentence = f"{name} is sick: {worker.num_failures} attempts failed there."
    return finding(
        "sick_worker",
        max(loss, OPEN_BREAKER if worker.breaker == "open" else 0.0, 0.3),
        sentence,
        [
            f"a step takes {milliseconds(worker.step_seconds)}" if is_slow else "",
            f"{worker.num_failures} failed attempts" if worker.num_failures and is_slow else "",
            f"its breaker is open: no requests for {worker.breaker_seconds:.0f} s" if worker.breaker == "open" else "",
        ],
        f"Look at its machine (other processes, clocks, temperature) and at `splitserve logs {name}`; "
        f"`splitserve drain {name}` takes it out without losing a request.",
    )


def failures(evidence: Evidence) -> Iterator[Finding]:
    """Requests fail."""
    total = sum(path.num for path in evidence.view.paths)
    failed = [path for path in evidence.view.paths if path.actual == "failed" and path.reason != "invalid"]
    num = sum(path.num for path in failed)
    if num < MIN_FAILURES or num < MIN_FAILED_SHARE * total:
        return
    yield finding(
        "failures",
        max(0.3, num / total),
        f"{num} of {total} requests failed.",
        [f"{path.num} with the reason {path.reason}" for path in failed[:5]],
        "`splitserve logs router` has a line with the reason for each of them.",
    )


def fallback(evidence: Evidence) -> Iterator[Finding]:
    """Requests that were meant for two workers run on one."""
    meant = [path for path in evidence.view.paths if path.intended == "disaggregated" and path.actual != "cancelled"]
    fell = [path for path in meant if path.actual == "local" and path.reason not in HARMLESS]
    num, total = sum(path.num for path in fell), sum(path.num for path in meant)
    if num < MIN_REQUESTS or num < MIN_FALLBACK_SHARE * total:
        return
    yield finding(
        "fallback",
        0.5 * num / total,
        f"{percent(num / total)} of the requests meant for a prefill and a decode worker ran on one worker.",
        [f"{path.num} with the reason {path.reason}" for path in fell[:5]],
        "`splitserve doctor --against URL` checks the connections between the workers.",
    )
