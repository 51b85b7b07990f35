"""Writer of the plots of ``docs/images/`` from the kept results: goodput by threshold, the router's latency by rate.

``python -m splitserve.benchmarks.tables.plots`` writes them again; it needs the extra ``report``. Each names the file
that it shows in its metadata, and a test compares that with the newest one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitserve.benchmarks.common.charts import (
    COLOURS,
    GREY,
    MARKERS,
    new_figure,
    require_matplotlib,
    scale_log,
    style,
    svg,
)
from splitserve.benchmarks.common.report import RESULTS_DIRECTORY
from splitserve.benchmarks.router.goals import ADDED_P99_MS, LATENCY_RATE
from splitserve.benchmarks.tables.cells import of_bench
from splitserve.benchmarks.tables.placement import Row, goodputs, newest
from splitserve.benchmarks.tables.runs import Run, read_runs

IMAGES = RESULTS_DIRECTORY.parents[1] / "docs" / "images"
WORKLOADS = ("short", "long", "cached", "mixed")
CLOSE = 0.97
"""Share of the best threshold's goodput that the policy is to reach."""
KINDS = {"ids": "token ids", "seen": "text, 90% seen before", "new": "new text"}
MIN_RATES = 2
LEAST_MS = 0.1


def newest_latency(runs: Sequence[Run]) -> tuple[Run, list[Row]] | None:
    """Return the newest kept run of ``bench router-limits`` with latencies at several rates, and their rows."""
    for run in reversed(of_bench(runs, "router-limits")):
        rows = run.content["results"].get("latency", [])
        if len({row["rate"] for row in rows}) >= MIN_RATES:
            return run, rows
    return None


def routes_chart(rows: Sequence[Row]) -> Any:
    """Draw goodput by threshold for each workload, and the tails of the mixed one by rate."""
    figure = new_figure(7.2, 7.2)
    panels = figure.subplots(3, 2)
    for axes, workload in zip(panels.flat, WORKLOADS, strict=False):
        _draw_thresholds(axes, workload, goodputs(rows, workload))
    _draw_tails(panels[2, 0], "ttft_p99_ms", "TTFT p99, ms", rows)
    _draw_tails(panels[2, 1], "itl_p99_ms", "ITL p99, ms", rows)
    scale_log(panels[2, 0].yaxis)
    panels[2, 1].set_ylim(bottom=0)
    panels[2, 0].legend(frameon=False, fontsize=8)
    return figure


def _draw_tails(axes: Any, key: str, label: str, rows: Sequence[Row]) -> None:
    for number, arm in enumerate(("cost", "always", "never")):
        own = [row for row in rows if row["workload"] == "mixed" and row["arm"] == arm]
        axes.plot([row["scale"] for row in own], [row[key] for row in own], label=arm, **_line(number))
    axes.set_title("mixed, tails", fontsize=9)
    axes.set_xlabel("rate, relative to two full pairs of workers")
    axes.set_ylabel(label)


def _line(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4, "linewidth": 1.2}


def _draw_thresholds(axes: Any, workload: str, found: Mapping[str, float]) -> None:
    fixed = {arm: rate for arm, rate in found.items() if arm != "cost"}
    best = max(fixed.values())
    labels = [arm.removeprefix("above ") for arm in fixed]
    axes.axhspan(CLOSE * best, best, color=GREY, alpha=0.15, linewidth=0, label="within 3% of the best threshold")
    axes.plot(labels, list(fixed.values()), label="fixed threshold", **_line(1))
    axes.axhline(found["cost"], color=COLOURS[0], linewidth=1.6, label="cost, no threshold")
    axes.set_title(workload, fontsize=9)
    axes.set_ylabel("goodput, requests/s")
    axes.set_xlabel("disaggregated above so many missed tokens")
    axes.set_ylim(0, 1.15 * max(best, found["cost"]))
    axes.tick_params(axis="x", labelsize=7)
    if workload == WORKLOADS[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower left")


def latency_chart(rows: Sequence[Row]) -> Any:
    """Draw the added p50 and p99 by rate for each kind of prompt, with the goals for p99."""
    figure = new_figure(7.2, 3.6)
    axes = figure.subplots()
    for number, (kind, words) in enumerate(KINDS.items()):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in own]
        p99, p50 = ([max(LEAST_MS, row[f"added_{share}_ms"]) for row in own] for share in ("p99", "p50"))
        axes.plot(rates, p99, label=f"{words}: p99", **_line(number))
        axes.plot(rates, p50, label=f"{words}: p50", **_line(number) | {"linestyle": "--", "markerfacecolor": "white"})
        axes.plot([LATENCY_RATE], [ADDED_P99_MS[kind]], "_", color=COLOURS[number], markersize=18, markeredgewidth=2.5)
    axes.plot([], [], "_", color=GREY, markersize=12, markeredgewidth=2.5, label="goal for p99")
    scale_log(axes.yaxis)
    axes.set_xticks(sorted({row["rate"] for row in rows}))
    axes.set_xlabel("requests per second")
    axes.set_ylabel("time added by the router, ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


PLOTS: Mapping[str, tuple[Callable[[Sequence[Run]], tuple[Run, list[Row]] | None], Callable[[Sequence[Row]], Any]]] = {
    "placement-routes.svg": (lambda runs: newest(runs, "routes"), routes_chart),
    "router-latency.svg": (newest_latency, latency_chart),
}
"""For each image: the run that it shows, with its rows, and the chart of these."""


def source_of(image: Path) -> str:
    """Return the name of the result file that an image shows."""
    found = re.search(r"<dc:source>([^<]*)</dc:source>", image.read_text(encoding="utf-8"))
    return "" if found is None else found[1]


def main() -> None:
    """Write all plots. Raises :class:`ConfigError` without matplotlib."""
    require_matplotlib()
    runs = read_runs()
    for name, (find, draw) in PLOTS.items():
        if (found := find(runs)) is None:
            continue
        run, rows = found
        with style():
            text = svg(draw(rows), name, source=run.path.name)
        (IMAGES / name).write_text(text + "\n", encoding="utf-8")
        print(f"{IMAGES / name} shows {run.path.name}")


if __name__ == "__main__":
    main()
