"""``splitserve bench up``: time from one command to a cluster that answers, and from another to nothing left of it.

Everything is run as a user runs it: ``splitserve up``, a completion, ``splitserve down``, without Ray and with a Ray
that ``up`` starts. Reported are the seconds from the start of ``up``

    command        to its first output: Python and its imports
    Ray            to the start of a Ray head (which answers shortly before ``router``)
    router         to a router that listens
    workers        to the last worker that is ready
    ready          to the end of ``up``: the cluster takes requests
    first token    to the first token of the first completion
    answer         to its last token

and those that ``down`` takes; beside them the phases of each worker's start, as its log has them. The first run builds
the kernels that this machine lacks. Leftovers of ``down`` are a failure: processes, files below the state folder,
shared memory. A run that fails or is interrupted ends its cluster before the bench ends, one that is killed soon after.
"""

import argparse
import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.commands import (
    describe,
    ended_on_failure,
    follow_command,
    processes_of,
    run_command,
)
from splitserve.benchmarks.common.report import add_result_options, keep_result, kept_options, table
from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.serving.conversations import completion_body
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import SplitserveError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.models.demo.published import NAMES, write_named_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.hosts.shared_memory import abandoned
from splitserve.orchestration.ray.commands import LOCAL

LIMIT_SECONDS = {"": 15.0, LOCAL: 40.0}
STAGES = ("command", "Ray", "router", "workers", "ready", "first token", "answer", "down")
OUTPUT_TOKENS = 4
LOG_LINES = 1000
"""Last lines of each log that are searched for the phases of its worker's start."""
_READY = re.compile(r"ready after [\d.]+ s: ([^\"]*)")
_PHASE = re.compile(r"(\S.*?) ([\d.]+)(?:, |$)")


def stage_of(line: str) -> str:
    """Return the stage that a line of ``up``'s output reports; "" for none."""
    if line.startswith("splitserve "):
        return "command"
    words = line.split()
    if words[:2] == ["ray", "head"]:
        return "Ray"
    if words[1:2] == ["listening"]:
        return "router"
    return "workers" if words[1:2] == ["ready"] else ""


def phases_of(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the seconds of the phases of each worker's start by worker, read from lines of ``splitserve logs``."""
    found = {}
    for line in lines:
        if ready := _READY.search(line):
            found[line.partition(":")[0]] = {name: float(seconds) for name, seconds in _PHASE.findall(ready[1])}
    return found


def measure(model: str, ray: str, state: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds by stage, and under "phases" those of the workers' starts. Raises :class:`SplitserveError` if
    a command or the request fails; the cluster is ended before."""
    seconds: dict[str, Any] = {}
    arguments = [model, "--prefill", str(options.prefill), "--decode", str(options.decode)]
    arguments += ["--mixed", str(options.mixed), "--port", "0", *options.up_options, *(["--ray", ray] if ray else [])]
    urls: list[str] = []

    def note(line: str) -> None:
        if stage := stage_of(line):
            seconds[stage] = time.monotonic() - began
        if line.startswith("Ready: "):
            urls.append(line.split()[1].removesuffix("/v1"))

    with ended_on_failure(state):
        began = time.monotonic()
        follow_command(state, "up", *arguments, on_line=note)
        seconds["ready"] = time.monotonic() - began
        record = first_answer(urls[0], Path(model).name)
        seconds["answer"] = time.monotonic() - began
        seconds["first token"] = seconds["answer"] - (record.end_seconds - record.chunk_seconds[0])
        seconds["phases"] = phases_of(run_command(state, "logs", "--lines", str(LOG_LINES)).splitlines())
        began = time.monotonic()
        run_command(state, "down")
        seconds["down"] = time.monotonic() - began
    return seconds


def first_answer(url: str, model: str) -> RequestRecord:
    """Send one completion of :data:`OUTPUT_TOKENS` tokens; returns its record.

    Tokens are counted by id: random weights draw tokens that have no text. Raises :class:`SplitserveError` if the
    request fails or has another number of tokens.
    """
    body = {**completion_body(model), "prompt": "The first words", "max_tokens": OUTPUT_TOKENS}
    [record] = asyncio.run(run_load(Endpoint(url), [body], [0.0]))
    if record.error:
        raise SplitserveError(f"the first request failed: {record.error}")
    if len(record.output_ids) != OUTPUT_TOKENS:
        raise SplitserveError(f"the first request gave {len(record.output_ids)} of {OUTPUT_TOKENS} tokens")
    return record


def traces(state: str) -> list[str]:
    """Describe leftovers of clusters of this state folder, and shared memory that no process uses."""
    found = [f"{path} is there" for path in (Path(state), *abandoned()) if path.exists()]
    return found + [f"process {describe(process)} runs" for process in processes_of(state)]


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="splitserve bench up",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prefill", type=not_negative, default=2, help="workers")
    parser.add_argument("--decode", type=not_negative, default=2, help="workers")
    parser.add_argument("--mixed", type=not_negative, default=0, help="workers")
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True, help="measure with Ray as well")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--model", default="", help="a checkpoint's directory; empty: the demo's, with 5 MB of weights")
    parser.add_argument(
        "--shape",
        default="",
        choices=NAMES,
        help="instead of --model: the configuration of such a model, without weights (--load-format dummy)",
    )
    parser.add_argument("up_options", nargs="*", metavar="-- OPTIONS", help="further options of splitserve up")
    parser.add_argument("--check-times", action="store_true", help="fail if an answer takes longer than allowed")
    add_result_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(list(argv))
    results: list[dict[str, object]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as directory:
        model = options.model or _model(Path(directory) / "model", options.shape)
        state = f"{directory}/state"
        before = set(traces(state))
        for ray in ("", LOCAL) if options.ray else ("",):
            runs = []
            for _ in range(options.repeats):
                runs.append(measure(model, ray, state, options))
                problems += sorted(set(traces(state)) - before)
                print(describe_run("Ray" if ray else "local", runs[-1]), flush=True)
            medians = {name: statistics.median(run[name] for run in runs) for name in STAGES if name in runs[0]}
            results.append({"place": "Ray" if ray else "local", "limit": LIMIT_SECONDS[ray], **medians, "runs": runs})
            if options.check_times and medians["answer"] > LIMIT_SECONDS[ray]:
                problems.append(f"an answer took {medians['answer']:.1f} s, more than {LIMIT_SECONDS[ray]:g} s")
    rows = [[each["place"], *(_shown(each.get(name)) for name in STAGES), each["limit"]] for each in results]
    print(table(rows, ["place", *(f"{name} s" for name in STAGES), "limit s"]))
    for problem in problems:
        print(f"FAIL {problem}")
    data = {"options": kept_options(options), "results": results, "problems": problems}
    keep_result("up", argv, data, options)
    return 1 if problems else 0


def describe_run(place: str, run: Mapping[str, Any]) -> str:
    """Format a run: its stages, and under them the phases of each worker's start. All in seconds."""
    lines = [f"{place}: {_listed({name: run[name] for name in STAGES if name in run})}"]
    lines += [f"  {worker}: {_listed(phases)}" for worker, phases in run["phases"].items()]
    return "\n".join(lines)


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())


def _model(directory: Path, shape: str) -> str:
    return str(write_named_config(directory, shape) if shape else write_demo_model(directory))


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else ""
