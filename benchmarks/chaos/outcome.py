"""Outcome of a run of ``splitserve bench chaos``: its figures for the JSON file and for people."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from splitserve.benchmarks.chaos.checks import Metrics, ProcessState
from splitserve.benchmarks.chaos.faults import FaultInjector
from splitserve.benchmarks.chaos.load import Answer, Expected
from splitserve.benchmarks.chaos.recovery import recovery, worst_stalls
from splitserve.benchmarks.common.report import table

MAX_SHOWN_PROBLEMS = 20
MAX_SHOWN_STALLS = 5


@dataclass(slots=True)
class Outcome:
    """Outcome of a run."""

    expected: Expected
    answers: list[Answer] = field(default_factory=list)
    injector: FaultInjector | None = None
    metrics: Metrics | None = None
    before: dict[str, ProcessState] = field(default_factory=dict)
    after: dict[str, ProcessState] = field(default_factory=dict)
    # Problems found under each heading: all empty is success.
    checks: dict[str, list[str]] = field(default_factory=dict)
    num_near_ties: int = 0  # answers that differ from the quiet run's only by near-ties

    @property
    def ok(self) -> bool:
        return not any(self.checks.values())


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the figures for the JSON file."""
    assert outcome.injector is not None and outcome.metrics is not None
    faults, answers = outcome.injector.faults, outcome.answers
    retried = [answer for answer in answers if answer.failed_attempts]
    return {
        "requests": len(answers),
        "requests_with_failed_attempts": len(retried),
        "requests_hit_by_several_faults": sum(
            len({a.worker for a in answer.failed_attempts}) > 1 for answer in retried
        ),
        "failed_attempts": Counter(attempt.reason for answer in retried for attempt in answer.failed_attempts),
        "cases": len(outcome.expected.cases),
        "near_ties": outcome.num_near_ties,
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "max_quiet_ttft_ms": max(outcome.expected.ttft_seconds) * 1e3,
        "faults": Counter(f"{fault.kind.value} {fault.role}" for fault in faults),
        "recovery": recovery(answers, faults),
        "worst_stalls": worst_stalls(answers, faults, MAX_SHOWN_STALLS),
        "ladder_steps": outcome.metrics.labelled("ladder_steps_total"),
        "requests_finished": outcome.metrics.labelled("requests_finished_total"),
        "reads_by_path": outcome.metrics.reads_by_path(),
        "transports": outcome.metrics.transports(),
        "resident_mib": {
            name: [outcome.before[name].resident_bytes >> 20, state.resident_bytes >> 20]
            for name, state in sorted(outcome.after.items())
        },
        "checks": {name: problems or "ok" for name, problems in outcome.checks.items()},
    }


def say(text: str) -> None:
    print(text, flush=True)


def print_summary(figures: dict[str, Any], outcome: Outcome) -> None:
    say(f"{figures['requests']} requests, {figures['output_tokens']} tokens")
    say(f"{figures['requests_with_failed_attempts']} requests survived failed attempts,")
    say(f"{figures['requests_hit_by_several_faults']} of them those of several workers: not in this table")
    say(f"{figures['near_ties']} answers differ by near-ties alone\n")
    reads = ", ".join(f"{count} {path}" for path, count in figures["reads_by_path"].items())
    say(
        f"reads of KV by the processes that were there at the end: {reads}; links: {', '.join(figures['transports'])}\n"
    )
    rows = [
        [name, row["faults"], row["requests"], row.get("p50_ms", "-"), row.get("p99_ms", "-")]
        for name, row in figures["recovery"].items()
    ]
    say(table(rows, ["fault", "times", "requests hit", "next token p50 ms", "p99 ms"]) + "\n")
    for stall in figures["worst_stalls"]:
        say("stalled: " + ", ".join(f"{key} {value}" for key, value in stall.items()))
    say("")
    for title, name in (("ladder steps", "ladder_steps"), ("requests finished", "requests_finished")):
        say(table([[labels, int(count)] for labels, count in figures[name].items()], [title, ""]) + "\n")
    for name, problems in outcome.checks.items():
        say(f"{'ok  ' if not problems else 'FAIL'} {name}")
        for problem in problems[:MAX_SHOWN_PROBLEMS]:
            say(f"       {problem}")
        if len(problems) > MAX_SHOWN_PROBLEMS:
            say(f"       and {len(problems) - MAX_SHOWN_PROBLEMS} more")
