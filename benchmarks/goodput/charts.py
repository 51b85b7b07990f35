"""Charts of a comparison, by matplotlib: as SVG within the report, and as PNG beside it."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.benchmarks.common.charts import COLOURS, GREY, MARKERS, new_figure, scale_log, style, svg
from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.verdict import SweepPoint, Verdict

WIDTH, HEIGHT = 7.2, 3.6  # inches
LEGEND_ROOM = 1.25  # height of a panel with a legend, in terms of its highest point


class Charts:
    """Charts by name, in the order of the report."""

    def __init__(self, verdict: Verdict, rows: Sequence[Mapping[str, Any]], probes: Sequence[ProbeResult]) -> None:
        self._figures: dict[str, Any] = {}
        with style():
            if verdict.sweep:
                self._figures["goodput by ITL objective"] = _sweep_chart(verdict)
            self._figures["latency by rate"] = _rate_chart(verdict, rows)
            if any(probe.stages for probe in probes):
                self._figures["TTFT by stage"] = _stage_chart(verdict, probes)

    @property
    def names(self) -> list[str]:
        return list(self._figures)

    def svg(self, name: str) -> str:
        """Return a chart as an SVG element without a fixed size, for a page."""
        return svg(self._figures[name], name)

    def png(self, name: str) -> bytes:
        """Return a chart as a PNG."""
        data = io.BytesIO()
        self._figures[name].savefig(data, format="png", dpi=144, bbox_inches="tight")
        return data.getvalue()


def _figure(num_rows: int = 1, height: float = HEIGHT) -> tuple[Any, Any]:
    figure = new_figure(WIDTH, height)
    return figure, figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0]


def _sweep_chart(verdict: Verdict) -> Any:
    known = [point for point in verdict.sweep if point.is_known]
    figure, panels = _figure(2 if known else 1, (1.5 if known else 0.8) * HEIGHT)
    num = max(1, verdict.num_devices)
    split = [(p.itl_ms, p.split_goodput / num, p.split_kind) for p in verdict.sweep if p.split_kind != "below"]
    mixed = [(p.itl_ms, p.mixed_goodput / num, p.mixed_kind) for p in verdict.sweep if p.mixed_kind != "below"]
    _draw_goodputs(panels[0], split, "o", "-", color=COLOURS[0], label="best disaggregated")
    _draw_goodputs(panels[0], mixed, "s", "--", color=COLOURS[1], label="best mixed")
    shown = [verdict.objectives.itl_ms, *(itl for itl, _, _ in (*split, *mixed))]
    panels[0].set_xlim(min(shown) / 1.2, max(shown) * 1.2)
    panels[0].set_ylabel("requests/s per device")
    panels[0].legend(frameon=False, ncols=2, loc="upper center")
    if known:
        _draw_ratios(panels[1], known)
    panels[-1].set_xlabel(f"ITL objective at p{verdict.objectives.percentile:g}, ms")
    for axes in panels:
        scale_log(axes.xaxis)
        axes.axvline(verdict.objectives.itl_ms, color=GREY, linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
    panels[0].set_ylim(top=LEGEND_ROOM * max((rate for _, rate, _ in (*split, *mixed)), default=1.0))
    return figure


def _draw_goodputs(
    axes: Any, points: Sequence[tuple[float, float, str]], marker: str, line: str, *, color: str, label: str
) -> None:
    """Draw goodput per device by ITL objective: a point is hollow where it is at least so much."""
    at_least = [(itl, rate) for itl, rate, kind in points if kind == "at least"]
    style = {"marker": marker, "color": color}
    axes.plot([itl for itl, _, _ in points], [rate for _, rate, _ in points], linestyle=line, label=label, **style)
    hollow = {"markerfacecolor": "white", "linestyle": "none", **style}
    axes.plot([itl for itl, _ in at_least], [rate for _, rate in at_least], **hollow)


def _draw_ratios(axes: Any, known: Sequence[SweepPoint]) -> None:
    below = [max(0.0, point.ratio - point.ratio_interval.low) for point in known]
    above = [max(0.0, point.ratio_interval.high - point.ratio) for point in known]
    axes.axhline(1.0, color=GREY, linewidth=1)
    itl, ratios = [point.itl_ms for point in known], [point.ratio for point in known]
    axes.errorbar(itl, ratios, yerr=(below, above), fmt="o-", capsize=4, color=COLOURS[0])
    axes.set_ylim(top=1.1 * max(1.0, *(ratio + more for ratio, more in zip(ratios, above, strict=True))))
    axes.set_ylabel("ratio, 90% interval")


def _rate_chart(verdict: Verdict, rows: Sequence[Mapping[str, Any]]) -> Any:
    objectives = verdict.objectives
    share = f"p{objectives.percentile:g}"
    panels = (
        ("ttft_ms", f"TTFT {share}, ms", objectives.ttft_ms),
        ("itl_ms", f"ITL {share}, ms", objectives.itl_ms),
        ("second_token_p99_ms", "second token p99, ms", None),
        ("longest_gap_ms", "longest gap, ms", None),
    )
    figure, axes = _figure(len(panels), 2.2 * HEIGHT)
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["rate"])
        for (column, _, _), panel in zip(panels, axes, strict=True):
            points = [(row["rate"], row[column]) for row in own if row[column] is not None]
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            panel.plot([x for x, _ in points], [y for _, y in points], label=arm, markersize=4, linewidth=1.2, **style)
            twins = [(row["rate"], row.get(f"simulated_{column}")) for row in own]
            twins = [(x, y) for x, y in twins if y is not None]
            hollow = {**style, "markerfacecolor": "white", "linestyle": ":", "linewidth": 0.8}
            panel.plot([x for x, _ in twins], [y for _, y in twins], markersize=5, zorder=1, **hollow)
    for (_, label, objective), panel in zip(panels, axes, strict=True):
        panel.set_ylabel(label)
        scale_log(panel.yaxis)
        if objective is not None:
            panel.axhline(objective, color=GREY, linewidth=1, linestyle=":")
    axes[-1].set_xlabel("requests per second")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def _stage_chart(verdict: Verdict, probes: Sequence[ProbeResult]) -> Any:
    """Draw the mean stages of TTFT of each arm, at its highest rate at which the objectives hold (or its lowest)."""
    chosen = []
    for arm in dict.fromkeys(probe.arm for probe in probes):
        own = [probe for probe in probes if probe.arm == arm and probe.stages]
        held = [probe for probe in own if probe.outcome.pressure(verdict.objectives) <= 1]
        if own:
            chosen.append(max(held, key=lambda p: p.rate) if held else min(own, key=lambda p: p.rate))
    figure, (axes,) = _figure(height=0.8 + 0.42 * len(chosen) + 0.6)
    stages = list(dict.fromkeys(name for probe in chosen for name in probe.stages))
    labels = [f"{probe.arm}\nat {probe.rate:g}/s" for probe in chosen]
    left = [0.0] * len(chosen)
    for number, stage in enumerate(stages):
        widths = [probe.stages.get(stage, {}).get("mean", 0.0) for probe in chosen]
        hatch = "///" if number >= len(COLOURS) else None
        axes.barh(labels, widths, left=left, color=COLOURS[number % len(COLOURS)], hatch=hatch, label=stage, height=0.6)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("mean time to first token by stage, ms")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure
