"""Objectives that requests miss, where no other cause is found: the stage that takes most of the time. Pure."""

from collections.abc import Iterator

from splitserve.protocol.reports.overview import Finding, Objective
from splitserve.router.admin.diagnosis.evidence import (
    MET_SHARE,
    MIN_REQUESTS,
    TTFT,
    Evidence,
    finding,
    milliseconds,
    percent,
)

ALONE_SEVERITY = 0.15
_NAMES = {"ttft": "time to first token", "tpot": "time per output token"}


def missed_objective(evidence: Evidence) -> Iterator[Finding]:
    """Requests miss an objective."""
    for objective in evidence.view.objectives:
        if objective.num >= MIN_REQUESTS and objective.num_met < MET_SHARE * objective.num:
            yield _missed(objective, evidence)


def _missed(objective: Objective, evidence: Evidence) -> Finding:
    missed = 1 - objective.num_met / objective.num
    most, reasons = "", []
    if objective.name == TTFT and evidence.view.stages:
        longest = max(evidence.view.stages, key=lambda stage: stage.times.mean)
        share = percent(evidence.share(longest.times.mean))
        most = f"; {share} of that time is {longest.name.replace('_', ' ')}"
        reasons = [f"{longest.name}: {longest.meaning[:1].lower()}{longest.meaning[1:]}"]
        remedy = (
            "Compare with the stages of a single request (`splitserve trace`); a sum of short ones needs less load."
        )
    else:
        busy = [worker for worker in evidence.decode if worker.step_seconds]
        reasons = [
            f"{worker.engine_id}: a step of {worker.step_sequences:.0f} sequences takes "
            f"{milliseconds(worker.step_seconds)}"
            for worker in busy[:3]
        ]
        remedy = (
            "Look at the gaps of a slow request (`splitserve trace`): they show whether steps or deliveries are late."
        )
    return finding(
        "missed_objective",
        ALONE_SEVERITY,
        f"{percent(missed)} of the requests miss the objective for the {_NAMES[objective.name]}, "
        f"{milliseconds(objective.seconds)}{most}.",
        reasons,
        remedy,
    )
