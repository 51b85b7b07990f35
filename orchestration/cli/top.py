"""``splitserve top``: the dashboard in a terminal."""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from splitserve.orchestration.cli.cluster_commands import CLEAR_SCREEN, WATCH_SECONDS
from splitserve.orchestration.cli.operate import add_operators_key_option
from splitserve.orchestration.cli.options import HelpFormatter
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.reports.overview import Overview, Times, WorkerFigures

BAR_WIDTH = 24
NUM_REASONS = 3
NUM_SLOWEST = 5
NARROWEST = 80


def add_top_command(commands: Any) -> None:
    """Add the command to ``commands``, the result of :meth:`argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "top",
        help="show the bottleneck, queues, KV, hand-overs and workers of a running cluster",
        description="Show what the page /dashboard shows, again every two seconds, until Ctrl-C.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--against", default="http://127.0.0.1:8000", metavar="URL", help="endpoint of the cluster")
    add_operators_key_option(parser)
    parser.add_argument("--once", action="store_true", help="show it once, as when the output is no terminal")
    parser.set_defaults(run=run_top)


def run_top(options: argparse.Namespace) -> int:
    """Show the overview once, or again and again. Raises :class:`SplitserveError`."""
    from splitserve.orchestration.doctor.http import Endpoint, UnreachableError
    from splitserve.orchestration.doctor.overview import read_overview
    from splitserve.orchestration.spec.expansion import read_operators_key

    endpoint = Endpoint(options.against, read_operators_key(options.api_key_file))
    lines = overview_lines(read_overview(endpoint), _width())
    if options.once or not sys.stdout.isatty():
        print("\n".join(lines))
        return 0
    while True:
        size = shutil.get_terminal_size()
        shown = (line[: size.columns] for line in lines[: max(1, size.lines - 1)])
        print(CLEAR_SCREEN + "\n".join(shown), flush=True)
        time.sleep(WATCH_SECONDS)
        try:
            lines = overview_lines(read_overview(endpoint), _width())
        except UnreachableError as error:  # the router may be on its way back
            lines = [str(error), *lines[1:]]


def _width() -> int:
    return max(NARROWEST, shutil.get_terminal_size((120, 50)).columns)


def overview_lines(view: Overview, width: int = 120) -> list[str]:
    """Return the overview as lines of text."""
    return [
        f"{view.served_model_name} on {view.machine}, splitserve {view.version}; the last {view.seconds:.0f} s",
        "",
        *_verdict(view, width),
        "",
        *_figures(view),
        "",
        *_workers(view.workers),
        *_slowest(view),
    ]


def _verdict(view: Overview, width: int) -> Iterator[str]:
    diagnosis = view.diagnosis
    yield from _wrapped(diagnosis.sentence, width)
    for number, finding in enumerate(diagnosis.findings):
        if number:
            yield from _wrapped(f"also: {finding.sentence}", width)
            continue
        for reason in finding.reasons[:NUM_REASONS]:
            yield from _wrapped(f"  - {reason}", width)
        yield from _wrapped(f"  what to do: {finding.remedy}", width)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    indent = " " * (4 if text.startswith(" ") else 0)
    return textwrap.wrap(text, width, subsequent_indent=indent, replace_whitespace=False)


# ---- figures ----


def _figures(view: Overview) -> Iterator[str]:
    rates, router = view.rates, view.router
    num_waiting = router.num_waiting + router.num_queued
    if view.num_routers > 1:
        yield _row("routers", f"{view.num_routers} on the port; all but requests/s and tokens/s is of one of them")
    if rates is not None:
        yield _row(
            "requests",
            f"{rates.requests_per_second:.1f}/s, {router.num_in_flight} in flight, {num_waiting} wait for a "
            f"worker; {rates.prompt_tokens_per_second:,.0f} prompt and {rates.output_tokens_per_second:,.0f} output "
            "tokens/s",
        )
    yield _row("latency", f"first token {_times(view.ttft)}; per token {_times(view.itl)}")
    yield from _objectives(view)
    yield from _prefill(view)
    yield from _decode(view)
    for each in view.transports:
        if each.num or each.problem:
            yield _row(
                "hand-over",
                f"{each.transport}: {_speed(each.read_bytes_per_second)}, link {_speed(each.link_bytes_per_second)}; "
                f"exposed {_times(each.exposed)}{'; ' if each.problem else ''}{each.problem}",
            )
    for path in view.paths[:4]:
        reason = "" if path.reason in ("ok", path.actual) else f" ({path.reason})"
        yield _row("path", f"{path.num} requests meant {path.intended}, were {path.actual}{reason}")
    yield from _hits(view)
    if view.stages:
        total = sum(stage.times.mean for stage in view.stages) or 1.0
        shown = sorted(view.stages, key=lambda stage: -stage.times.mean)[:4]
        parts = (
            f"{stage.name} {_seconds(stage.times.mean)} ({100 * stage.times.mean / total:.0f}%)" for stage in shown
        )
        yield _row("first token", ", ".join(parts))
    yield _row("router", f"busy {_percent(router.busy_share)}, timers up to {_seconds(router.lag_seconds)} late")


def _objectives(view: Overview) -> Iterator[str]:
    for each in view.objectives:
        met = each.num_met / each.num if each.num else 1.0
        yield _row("objective", f"{each.name} within {_seconds(each.seconds)}: {_percent(met)} of {each.num} requests")


def _prefill(view: Overview) -> Iterator[str]:
    workers = _computing(view.workers, "prefill")
    if workers:
        tokens = view.router.queued_tokens + sum(worker.waiting_tokens for worker in workers)
        busy = sum(worker.busy_share for worker in workers) / len(workers)
        speed = sum(worker.prompt_tokens_per_second for worker in workers)
        yield _row("prefill", f"{_bar([(busy, '#')])} busy {_percent(busy)}; {tokens:,} tokens wait, {speed:,.0f}/s")


def _decode(view: Overview) -> Iterator[str]:
    workers = _computing(view.workers, "decode")
    if workers:
        blocks = sum(worker.blocks for worker in workers) or 1
        used = sum(worker.blocks_used for worker in workers) / blocks
        reserved = sum(worker.blocks_reserved for worker in workers) / blocks
        cached = sum(worker.blocks_cached for worker in workers) / blocks
        shown = _bar([(used, "#"), (reserved, "/"), (cached, ".")])
        text = f"used {_percent(used)} (#), reserved and empty {_percent(reserved)} (/), cached {_percent(cached)} (.)"
        yield _row("decode KV", f"{shown} {text}")


def _hits(view: Overview) -> Iterator[str]:
    prompts = view.prompts
    if prompts.tokens:
        possible = (
            "" if prompts.known_tokens is None else f" of {_percent(prompts.known_tokens / prompts.tokens)} possible"
        )
        tiers = ", ".join(f"{tier.tier} {tier.tokens:,}" for tier in view.hits if tier.tokens)
        found = f"{_percent(prompts.cached_tokens / prompts.tokens)}{possible}"
        yield _row("prefix hits", f"{found}{'; tokens by tier: ' if tiers else ''}{tiers}")


def _computing(workers: Sequence[WorkerFigures], role: str) -> list[WorkerFigures]:
    """Return the workers that serve and have this role, or are mixed."""
    states = (str(WorkerState.READY), str(WorkerState.DRAINING))
    return [worker for worker in workers if worker.state in states and worker.role in (role, "mixed")]


# ---- tables ----


def _workers(workers: Sequence[WorkerFigures]) -> list[str]:
    header = ("worker", "role", "state", "breaker", "busy", "decodes", "queue", "KV", "prompt/s", "output/s", "notes")
    return _table([header, *map(_worker_row, workers)], left={0, 1, 2, 3, 10})


def _worker_row(worker: WorkerFigures) -> tuple[str, ...]:
    notes = [
        f"{worker.slowness:.1f} x as slow as its peers" if worker.slowness >= 1.5 else "",
        f"{worker.num_failures} failed attempts" if worker.num_failures else "",
        f"silent for {worker.silent_seconds:.0f} s" if worker.silent_seconds > 3 else "",
        *(f"tier {tier} is down" for tier in worker.tiers_down),
    ]
    return (
        worker.engine_id,
        worker.role,
        worker.state,
        worker.breaker if worker.breaker == "closed" else f"open {worker.breaker_seconds:.0f} s",
        _percent(worker.busy_share),
        f"{worker.num_running}/{worker.max_num_seqs}",
        f"{worker.waiting_tokens:,}",
        _percent((worker.blocks_used + worker.blocks_reserved) / max(1, worker.blocks)),
        f"{worker.prompt_tokens_per_second:,.0f}",
        f"{worker.output_tokens_per_second:,.0f}",
        "; ".join(note for note in notes if note),
    )


def _slowest(view: Overview) -> list[str]:
    if not view.slowest:
        return []
    rows = [("slowest requests", "first token", "longest gap", "prompt", "output", "workers")]
    for trace in view.slowest[:NUM_SLOWEST]:
        summary = trace.summary
        rows.append(
            (
                summary.request_id,
                "-" if summary.ttft_seconds is None else _seconds(summary.ttft_seconds),
                _seconds(summary.longest_gap_seconds),
                f"{summary.num_prompt_tokens:,}",
                f"{summary.num_output_tokens:,}",
                " -> ".join(dict.fromkeys((summary.prefill, summary.decode))),
            )
        )
    return ["", *_table(rows, left={0, 5})]


def _table(rows: Sequence[Sequence[str]], left: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# ---- numbers ----


def _row(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _bar(parts: Sequence[tuple[float, str]]) -> str:
    cells, total = "", 0.0
    for share, sign in parts:
        total += share
        cells += sign * (round(BAR_WIDTH * min(1.0, total)) - len(cells))
    return f"[{cells.ljust(BAR_WIDTH)}]"


def _times(times: Times) -> str:
    return f"{_seconds(times.p50)} median, {_seconds(times.p99)} p99" if times.num else "-"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.1
        else f"{1e3 * seconds:.1f} ms"
    )


def _speed(bytes_per_second: float) -> str:
    giga = bytes_per_second / 1e9
    return f"{giga:.1f} GB/s" if giga >= 1 else f"{1e3 * giga:.0f} MB/s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
