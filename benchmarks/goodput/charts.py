"""Charts of a comparison, by matplotlib: as SVG within the report, and as PNG beside it."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.verdict import SweepPoint, Verdict
from splitserve.common.errors import ConfigError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
"""Colours that people with colour-blindness tell apart (Okabe and Ito), and one more."""
MARKERS = "osD^vP*X"
WIDTH, HEIGHT = 7.2, 3.6  # inches


def require_matplotlib() -> None:
    """Raise :class:`ConfigError` where matplotlib is missing: before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the report's charts need matplotlib: pip install 'splitserve[report]'") from error


class Charts:
    """Charts by name, in the order of the report."""

    def __init__(self, verdict: Verdict, rows: Sequence[Mapping[str, Any]], probes: Sequence[ProbeResult]) -> None:
        from matplotlib import rc_context

        self._figures: dict[str, Any] = {}
        with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}):
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
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            self._figures[name].savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
        return _element(text.getvalue())

    def png(self, name: str) -> bytes:
        """Return a chart as a PNG."""
        data = io.BytesIO()
        self._figures[name].savefig(data, format="png", dpi=144, bbox_inches="tight")
        return data.getvalue()


def _element(svg: str) -> str:
    """Return the <svg> element of a document, without its declaration and its fixed size."""
    head, _, rest = svg[svg.index("<svg") :].partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest


def _figure(num_rows: int = 1, height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0]


def _sweep_chart(verdict: Verdict) -> Any:
    known = [point for point in verdict.sweep if point.is_known]
    figure, panels = _figure(2 if known else 1, (1.5 if known else 0.8) * HEIGHT)
    itl = [point.itl_ms for point in verdict.sweep]
    num = max(1, verdict.num_devices)
    split, mixed = ([getattr(p, name) / num for p in verdict.sweep] for name in ("split_goodput", "mixed_goodput"))
    panels[0].plot(itl, split, "o-", color=COLOURS[0], label="best disaggregated")
    panels[0].plot(itl, mixed, "s--", color=COLOURS[1], label="best mixed")
    panels[0].set_ylabel("requests/s per device")
    panels[0].legend(frameon=False)
    if known:
        _draw_ratios(panels[1], known)
    panels[-1].set_xlabel(f"ITL objective at p{verdict.objectives.percentile:g}, ms")
    for axes in panels:
        _scale_log(axes.xaxis)
        axes.axvline(verdict.objectives.itl_ms, color="#888888", linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
    return figure


def _draw_ratios(axes: Any, known: Sequence[SweepPoint]) -> None:
    itl = [point.itl_ms for point in known]
    low, high = ([getattr(point.ratio_interval, end) for point in known] for end in ("low", "high"))
    axes.axhline(1.0, color="#888888", linewidth=1)
    axes.fill_between(itl, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(itl, [point.ratio for point in known], "o-", color=COLOURS[0])
    axes.set_ylabel("ratio, 90% interval")


def _scale_log(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


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
    for (_, label, objective), panel in zip(panels, axes, strict=True):
        panel.set_ylabel(label)
        _scale_log(panel.yaxis)
        if objective is not None:
            panel.axhline(objective, color="#888888", linewidth=1, linestyle=":")
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
