"""The report of a comparison: one HTML file without external parts, for a screen of any width and for paper."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from splitserve.benchmarks.goodput.charts import Charts
from splitserve.benchmarks.goodput.objectives import LASTING_TTFTS
from splitserve.benchmarks.goodput.probe import SETTLED_SHARE, ProbeResult
from splitserve.benchmarks.goodput.result import SIMULATED, Conditions
from splitserve.benchmarks.goodput.verdict import Difference, Verdict, crossing, losing_region, ranked, sentence

CAPTIONS = {
    "goodput by ITL objective": "Goodput per device against the ITL objective. Hollow: at least so much, since all "
    "probes held. Where a line has no point, no probe held. Below: the best disaggregated arm over the best mixed one, "
    "where the probes bracket both.",
    "latency by rate": "Latency against the offered rate. Dotted: the objectives. Hollow: the same load on the arm's "
    "twin.",
    "TTFT by stage": "Where the time to first token goes, at the highest rate at which each arm holds the objectives.",
}
MIN_SPAN_PERCENT = 0.4
RATIOS = (1.0, 1.3)


def render(
    conditions: Conditions,
    verdict: Verdict,
    rows: Sequence[Mapping[str, Any]],
    probes: Sequence[ProbeResult],
    about: Mapping[str, str],
) -> str:
    """Return the report. ``about``: command, versions and machine, in words."""
    charts = Charts(verdict, rows, probes)
    template = Template(files("splitserve.benchmarks.goodput").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"Goodput: {conditions.workload} on {verdict.num_devices or 'given'} devices"),
        verdict=escape(sentence(verdict)),
        losing=escape(" ".join(filter(None, [losing_region(verdict), *_crossings(verdict)]))),
        objectives=escape(conditions.objectives.words),
        arms=_arms_table(verdict, {row["arm"]: row["simulated_goodput"] for row in rows}),
        effects=_effects_table(verdict.effects),
        charts="\n".join(_chart(charts, name) for name in charts.names),
        probes=_table(("arm", *(name.replace("_", " ") for name in rows[0] if name != "arm")), map(_cells, rows)),
        lanes=_lanes(probes),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes(probes, verdict)),
        about=_table(("", ""), ((escape(name), escape(value)) for name, value in about.items())),
    )


def notes(probes: Sequence[ProbeResult], verdict: Verdict) -> list[str]:
    """Return caveats about the figures."""
    found = [
        f"{arm.name}: no probe held the objectives; its goodput is below the lowest rate that was offered"
        for arm in verdict.arms
        if arm.goodput.kind == "below"
    ]
    found += [
        f"{arm.name}: every probe held the objectives; its goodput is at least the highest rate that was offered"
        for arm in verdict.arms
        if arm.goodput.kind == "at least"
    ]
    found += [
        f"{arm.name}: it computes prompts beside outputs, in the time that the given objectives leave; at other ITL "
        "objectives it would hold other rates than the chart's"
        for arm in verdict.arms
        if verdict.sweep and arm.fills_gaps
    ]
    found += _short_loads(probes, verdict)
    for probe in probes:
        if not probe.kept_the_rate:
            found.append(
                f"{probe.arm} at {probe.rate:g}/s: the client offered {probe.offered_rate:.3g}/s; use "
                "--client-processes, or another machine for the client"
            )
        if probe.num_short:
            found.append(
                f"{probe.arm} at {probe.rate:g}/s: {probe.num_short} of {len(probe.ttft_ms)} answers were shorter than "
                "asked, so the load was lighter: the endpoint must take ignore_eos, and have room for whole answers"
            )
        if failed := probe.figures["failed"]:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in failed.items())
            found.append(f"{probe.arm} at {probe.rate:g}/s: requests failed: {reasons}")
    return found


def _short_loads(probes: Sequence[ProbeResult], verdict: Verdict) -> Iterable[str]:
    """Yield a note on each arm whose highest load that held is too short to show a queue that grows slowly."""
    objectives = verdict.objectives
    held = [probe for probe in probes if probe.outcome.pressure(objectives) <= 1]
    highest = {probe.arm: probe for probe in sorted(held, key=lambda probe: probe.rate)}
    for arm, probe in highest.items():
        # As many requests as come in that time on average are enough, even if those of this load came sooner
        num_enough = int((1 - SETTLED_SHARE) * probe.rate * objectives.lasting_seconds)
        if probe.seconds < objectives.lasting_seconds and len(probe.ttft_ms) < num_enough:
            yield (
                f"{arm} at {probe.rate:g}/s: the load took {probe.seconds:.3g} s, less than {LASTING_TTFTS} times the "
                "TTFT objective: a queue that grows slowly would not show, so goodput may be lower; give --min-seconds "
                f"{objectives.lasting_seconds:g}"
            )


def _crossings(verdict: Verdict) -> Iterable[str]:
    for ratio in RATIOS:
        at = crossing(verdict.sweep, ratio)
        if at is not None:
            yield f"It reaches {ratio:g} times the best mixed arm at an ITL objective of {at:.3g} ms."


def _arms_table(verdict: Verdict, simulated: Mapping[str, float | None]) -> str:
    held = {arm.name: arm.goodput.rate for arm in verdict.arms if arm.goodput.kind != "below"}
    best = max(held.values(), default=0.0)
    rows = []
    for arm in ranked(verdict.arms):
        share = held.get(arm.name, 0.0) / best if best else 0.0
        per_device = f"{arm.goodput.rate / verdict.num_devices:.3g}" if verdict.num_devices else "-"
        bar = f'<span class="bar" style="width:{100 * share:.1f}%"></span>'
        of_twin = simulated[arm.name]
        twin = "-" if of_twin is None else f"{of_twin:.3g}"
        rows.append((escape(arm.name), escape(arm.goodput.words), arm.interval.words, twin, per_device, bar))
    return _table(("arm", "goodput", "90% interval", "simulated", "per device", ""), rows)


def _effects_table(effects: Sequence[Difference]) -> str:
    if not effects:
        return "<p>The arms don't vary routing and disaggregation independently.</p>"
    rows = [
        (
            escape(f"{each.first} against {each.second}"),
            f"{each.ratio:.2f}",
            each.ratio_interval.words,
            f"{each.difference:+.3g}",
            each.difference_interval.words,
            ("yes" if each.is_clear else "no") if each.is_known else "not known",
        )
        for each in effects
    ]
    return _table(("", "ratio", "90% interval", "difference, requests/s", "90% interval", "clear"), rows)


def _chart(charts: Charts, name: str) -> str:
    caption = f"<figcaption>{CAPTIONS[name]}</figcaption>"
    return f'<figure role="img" aria-label="{escape(name)}">{charts.svg(name)}{caption}</figure>'


def _lanes(probes: Sequence[ProbeResult]) -> str:
    """Return the slowest requests of each arm's last probe as lanes over time."""
    last = {probe.arm: probe for probe in probes if probe.slowest}
    parts = []
    for arm, probe in last.items():
        lanes = "".join(_lane(trace) for trace in probe.slowest)
        parts.append(f"<h3>{escape(arm)} at {probe.rate:g} requests/s</h3>{lanes}")
    return "".join(parts) or "<p>The endpoints report no timelines.</p>"


def _lane(trace: Mapping[str, Any]) -> str:
    total = max(trace["summary"]["seconds"], 1e-9)
    spans = []
    for span in trace["spans"]:
        begin, width = 100 * span["begin"] / total, max(MIN_SPAN_PERCENT, 100 * span["seconds"] / total)
        words = escape(f"{span['process']}: {span['name']}, {1e3 * span['seconds']:.2f} ms")
        kind = "router" if span["process"] == "router" else span["process"].partition("-")[0]
        spans.append(
            f'<i class="{escape(kind)}" style="left:{min(99.6, max(0.0, begin)):.2f}%;width:{min(100.0, width):.2f}%" '
            f'title="{words}"></i>'
        )
    ttft = trace["summary"]["ttft_seconds"]
    label = f"TTFT {1e3 * ttft:.0f} ms of {1e3 * total:.0f}" if ttft is not None else "no token"
    return f'<div class="lane"><span>{label}</span><div>{"".join(spans)}</div></div>'


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(
        "<tr>" + f'<th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Mapping[str, Any]) -> list[str]:
    return ["-" if value is None and name in SIMULATED else _cell(value) for name, value in row.items()]


def _cell(value: Any) -> str:
    if value is None:
        return "&infin;"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
