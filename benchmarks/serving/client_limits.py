"""``splitserve bench client``: what the load generator can offer on this machine.

A server that does no work streams answers from a process of its own; the client of `bench goodput` sends it requests at
rising rates, then holds many streams open. Shown are the rate that was offered against the asked one, the streamed
events per second, and how late requests left.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from splitserve.benchmarks.common.arguments import positive, positive_seconds
from splitserve.benchmarks.common.children import child_process, next_line
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.benchmarks.goodput.probe import OFFERED_SHARE, offered_rate
from splitserve.benchmarks.serving.conversations import Prompts, completion_body, run_in_processes
from splitserve.benchmarks.serving.load import Endpoint
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.workloads.synthetic import Exact, make


@dataclass(frozen=True, slots=True)
class Point:
    """One load: ``num_tokens`` events per request, ``interval_ms`` apart."""

    rate: float
    num_tokens: int
    interval_ms: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a load."""

    asked: float  # requests per second
    offered: float
    num_events: int  # received
    events_per_second: float
    expected_events_per_second: float
    lag_p99_ms: float
    client_cpu_share: float  # of one core; of a single client process
    failed: int

    @property
    def keeps_up(self) -> bool:
        return not self.failed and abs(self.offered - self.asked) <= OFFERED_SHARE * self.asked


def main(argv: Sequence[str]) -> int:
    """Measure each load; exit status 1 if the client couldn't keep up with one."""
    options = parser().parse_args(list(argv))
    points = [Point(rate, options.tokens, 0.0) for rate in options.rates]
    streams_rate = options.events / options.stream_tokens
    points.append(Point(streams_rate, options.stream_tokens, 1e3 * options.streams / options.events))
    measured = [measure(point, options.seconds, options.client_processes) for point in points]
    print(
        table(
            [_row(each) for each in measured], ("requests/s", "offered", "events/s", "p99 lag, ms", "CPU", "keeps up")
        )
    )
    keep_result("client", argv, {"loads": [asdict(m) for m in measured]}, options)
    return 0 if all(m.keeps_up for m in measured) else 1


def _row(of: Measured) -> list[object]:
    events = f"{of.events_per_second:,.0f} of {of.expected_events_per_second:,.0f}"
    cpu, keeps_up = f"{100 * of.client_cpu_share:.0f}%", "yes" if of.keeps_up else "no"
    return [f"{of.asked:g}", f"{of.offered:.1f}", events, f"{of.lag_p99_ms:.2f}", cpu, keeps_up]


def measure(point: Point, seconds: float, num_processes: int = 1) -> Measured:
    """Offer one load for about ``seconds``."""
    workload = make(Exact(16, point.num_tokens), point.rate, max(2, round(point.rate * seconds)), seed=0)
    prompts = Prompts(range(10, 1000), 0, completion_body("any"))
    with _server(point.interval_ms) as url:
        began = time.process_time()
        turns = run_in_processes(Endpoint(url), workload, prompts, num_processes)
        cpu = time.process_time() - began
    records = [turn.record for turn in turns]
    end = max(record.end_seconds for record in records)
    first = min(record.sent_seconds for record in records)
    span = max(end - first, 1e-9)
    num_events = sum(len(record.chunk_seconds) for record in records)
    planned = workload.conversations[-1].start_seconds + 1e-3 * point.interval_ms * (point.num_tokens - 1)
    return Measured(
        asked=point.rate,
        offered=offered_rate(point.rate, workload, turns),
        num_events=num_events,
        events_per_second=num_events / span,
        expected_events_per_second=workload.num_output_tokens / max(planned, 1e-9),
        lag_p99_ms=percentiles_ms([record.sent_seconds - record.due_seconds for record in records])["p99"],
        client_cpu_share=cpu / span if num_processes == 1 else float("nan"),
        failed=sum(bool(record.error) for record in records),
    )


@contextlib.contextmanager
def _server(interval_ms: float) -> Iterator[str]:
    module = "splitserve.benchmarks.serving.stream_server"
    with child_process(module, "--interval-ms", str(interval_ms)) as process:
        yield f"http://127.0.0.1:{next_line(process)}"


def parser() -> argparse.ArgumentParser:
    """Return the bench's parser."""
    parser = CommandParser(prog="splitserve bench client", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add("--rates", nargs="+", type=positive_seconds, default=[100.0, 250.0, 500.0], metavar="R")
    add("--tokens", type=positive, default=8, metavar="N", help="events per request at these rates")
    add("--events", type=positive, default=15_000, metavar="N", help="events per second over long streams")
    add("--streams", type=positive, default=256, metavar="N", help="streams that are open at once for that")
    add("--stream-tokens", type=positive, default=256, metavar="N", help="events of each of them")
    add("--seconds", type=positive_seconds, default=10.0, help="time of each load")
    add("--client-processes", type=positive, default=1, metavar="N", help="processes of the load generator")
    add_result_options(parser)
    return parser
