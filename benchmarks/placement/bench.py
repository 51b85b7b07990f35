"""``splitserve bench placement``: the router's placement on replayed workloads, under virtual time.

The router is the production core with its membership, prefix index and policies; workers are paced by step-time models.
Only ``turns`` and ``workers`` run processes, and take minutes.

    hits          conversation and synthetic trace at 70% of 8 prefill workers' speed: hits against a pooled cache
    load          conversation trace at 0.8 to 1.3 times that speed, also with half of the workers at half speed
    sessions      conversations with and without keys; a system prompt that all share
    routes        conditional disaggregation against eight fixed thresholds, on four workloads
    arrangements  1P1D with ``cost`` against plain 1P1D and two mixed workers, on the twin of two GPUs
    objectives    goodput of the same at the 99th percentile, of a load that comes after a rest; 30 minutes
    room          share of decode's KV that is reserved and empty, by load
    turns         TTFT of conversations' later turns on a real prefill and a real decode worker
    workers       conversation trace, scaled down, at 0.8 to 1.1 times the speed of three real prefill workers

``hits``, ``load`` and ``workers`` replay traces in Mooncake's form (``--traces``). A row says in ``holds`` whether the
case's aim is reached. The same command gives the same figures; not of ``turns`` and ``workers``, which are measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.placement import arrangements, cases, objectives, turns, workers
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser

SCALES = (0.7, 0.85, 1.0, 1.15, 1.3)
USUAL_CONVERSATIONS = 4
"""Of each arm of the case ``turns``."""
_COLUMNS = ("ttft_p50_ms", "ttft_p99_ms", "queue_p99_ms", "itl_p99_ms", "queue_max_over_mean", "local_share")
_OWN_COLUMNS = (
    "hits_of_oracle",
    "of_best",
    "prompts_max_over_mean",
    "ttft_p50_below",
    "queue_p99_below",
    "goodput",
    "bound",
    "goodput_ratio",
    "worst_of_plain",
    "failed_share",
    "empty_share",
    "first_ttft_p50_ms",
    "cached_share",
    "read_blocks",
    "same_answers",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that ``argv`` names. Raises :class:`ConfigError` for traces that can't be read."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    directory, count = Path(options.traces), options.requests
    runs: dict[str, Callable[[], Iterator[cases.Row]]] = {
        "hits": lambda: cases.hits(directory, count),
        "load": lambda: cases.load(directory, count),
        "sessions": lambda: cases.sessions(count or 3000),
        "routes": lambda: cases.routes(count or 1000, SCALES),
        "arrangements": lambda: arrangements.arrangements(count or arrangements.USUAL_REQUESTS),
        "objectives": lambda: objectives.objectives(count or objectives.USUAL_REQUESTS),
        "room": lambda: cases.room(count),
        "turns": lambda: turns.turns(count // turns.NUM_TURNS or USUAL_CONVERSATIONS, options.device, options.dtype),
        "workers": lambda: workers.workers(directory, count or workers.USUAL_REQUESTS, options.rounds),
    }
    results: dict[str, list[cases.Row]] = {}
    for name in options.cases or runs:
        try:
            rows = results[name] = list(runs[name]())
        except OSError as error:
            raise ConfigError(f"a trace can't be read: {error}; --traces names the folder of *_trace.jsonl") from error
        print(name)
        _show(rows)
    keep_result("placement", arguments, {"cases": results}, options)
    return 0 if all(row.get("holds", True) for rows in results.values() for row in rows) else 1


def _show(rows: Sequence[cases.Row]) -> None:
    labels = [
        key
        for key in ("trace", "steps", "gpu", "workload", "load", "slow_share", "scale", "itl_ms", "arm")
        if any(key in row for row in rows)
    ]
    columns = [key for key in (*_OWN_COLUMNS, *_COLUMNS, "holds") if any(key in row for row in rows)]
    cells = [[row.get(key, "") for key in (*labels, *columns)] for row in rows]
    print(table(cells, [*labels, *columns]))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="splitserve bench placement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ("hits", "load", "sessions", "routes", "arrangements", "objectives", "room", "turns", "workers")
    add("--cases", nargs="+", choices=names, default=[], help="cases to run (default: all)")
    add("--traces", default="../shared/traces", metavar="DIR", help="folder of conversation_ and synthetic_trace.jsonl")
    add(
        "--requests",
        type=not_negative,
        default=0,
        metavar="N",
        help="requests of each replay; 0: all of a trace",
    )
    add("--rounds", type=positive, default=3, metavar="N", help="rounds of the case workers, each with other requests")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the case turns")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the case turns; bfloat16 is for GPUs")
    add_result_options(parser)
    return parser
