"""Sections of ``benchmarks/results/README.md``, and the formats of their cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from splitserve.benchmarks.tables.runs import NO_COMMIT, Run, short

Rows = list[list[str]]
ARRANGEMENTS = {
    "1P1D": "1P1D, 2 GPUs",
    "mixed": "1 mixed, 1 GPU",
    "2 mixed": "2 mixed, 2 GPUs",
    "conditional": "1P1D conditional, 2 GPUs",
    "1P1D second token": "1P1D, second token at prefill, 2 GPUs",
    "conditional second token": "1P1D conditional, second token at prefill, 2 GPUs",
}
"""Arrangements of ``bench isolation``, in the order of the tables, with the titles of their columns."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    conditions: str  # common to all rows
    headers: Sequence[str]
    rows: Rows


def of_bench(runs: Iterable[Run], bench: str) -> list[Run]:
    return [run for run in runs if run.bench == bench]


def number(value: float) -> str:
    """Format with two decimals below 10, one below 100, none above."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def extent(values: Sequence[float], text: Callable[[float], str] = number, *, high: bool = False) -> str:
    """Format best and worst of ``values`` like ``5.42 to 5.96``; ``high``: the highest is the best."""
    best, worst = (text(each) for each in (sorted(values, reverse=high)[0], sorted(values, reverse=high)[-1]))
    return best if best == worst else f"{best} to {worst}"


def run_link(run: Run) -> str:
    return f"[{run.label}]({run.path.name})"


def commit(run: Run) -> str:
    return short(run.commit) or f"**{NO_COMMIT}**"


def awake(run: Run) -> str:
    return "awake" if run.keeps_cores_awake else "default"
