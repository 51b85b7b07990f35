"""Limits of one router process: CPU time per request, added latency by rate, streams, long prompts, memory, workers.

    load generator --HTTP--> router --ZMQ--> workers that answer at once, each token in a message of its own
    load generator --------------------ZMQ--> one of these workers          arm "direct"

Prompts have 2,000 tokens of a vocabulary of 32,768: token ids, a new chat text ("new": 2% of its words are numbers that
never come again), or a chat of ten messages of which nine came before ("seen"). CPU time counts the router's process
and its helpers; a busy machine disturbs it least. Added latency is the end of an answer through the router less that
of the direct arm, both by percentile. In the parts latency, sustained, workers and memory the router's event loop runs
on a core of which load generator and workers are kept off, where the machine has more than one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from splitserve.benchmarks.common.arguments import positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.router import goals, scenarios, tenants
from splitserve.benchmarks.router.vocabulary import Language
from splitserve.orchestration.cli.command_parser import CommandParser

PARTS: dict[str, Callable[[Language, argparse.Namespace], list[dict[str, Any]]]] = {
    "latency": scenarios.latency_by_rate,
    "sustained": scenarios.sustained,
    "streams": scenarios.streams,
    "long": scenarios.long_prompts,
    "workers": scenarios.by_workers,
    "tenants": tenants.flood,
    "memory": scenarios.memory,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that ``argv`` names; exit status 1 if a request failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    language = Language(options.seed)
    results: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        rows = results[part] = PARTS[part](language, options)
        print(f"\n{part}")
        print(table([[row.get(name, "") for name in rows[0]] for row in rows], list(rows[0])), flush=True)
    verdicts = goals.verdicts(results)
    print(f"\n{table([list(verdict.values()) for verdict in verdicts], list(verdicts[0]))}" if verdicts else "")
    keep_result("router-limits", arguments, {"results": results, "goals": verdicts}, options)
    return 1 if any(row.get("failed") for rows in results.values() for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench router-limits", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    parser.add_argument("--seconds", type=positive_seconds, default=15.0, help="length of each load")
    parser.add_argument(
        "--rate",
        type=positive_seconds,
        nargs="+",
        default=[25.0, 50.0, 100.0, 200.0, 300.0],
        help="requests per second",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=2000)
    parser.add_argument("--memory-requests", type=positive, default=100_000)
    parser.add_argument("--num-workers", type=positive, nargs="+", default=[2, 8, 64])
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
