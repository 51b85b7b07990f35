"""``splitserve bench up``: time from one command to a cluster that answers, and from another to nothing left of it.

Everything is run as a user runs it: ``splitserve up``, a completion, ``splitserve down``, without Ray and with a Ray
that ``up`` starts. Reported are the seconds from the start of ``up``

    command    to its first output: Python and its imports
    Ray        to the start of a Ray head (which answers shortly before ``router``)
    router     to a router that listens
    workers    to the last worker that is ready
    answer     to the answer of the first completion

and those that ``down`` takes. Leftovers of ``down`` are a failure: processes, files below the state folder, shared
memory.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.kv.handover_served import run_command
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.common.errors import SplitserveError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.models.demo.published import NAMES, write_named_config
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.hosts.shared_memory import abandoned
from splitserve.orchestration.ray.commands import LOCAL

LIMIT_SECONDS = {"": 15.0, LOCAL: 40.0}
STAGES = ("command", "Ray", "router", "workers", "answer", "down")


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


def measure(model: str, ray: str, state: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure the seconds by stage. Raises :class:`SplitserveError` if a command fails."""
    seconds: dict[str, float] = {}
    arguments = ["up", model, "--prefill", str(options.prefill), "--decode", str(options.decode)]
    arguments += ["--mixed", str(options.mixed), "--port", "0", *options.up_options]
    began = time.monotonic()
    url, lines = "", []
    with subprocess.Popen(
        [sys.executable, "-m", "splitserve.orchestration.cli.main", *arguments, *(["--ray", ray] if ray else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SPLITSERVE_STATE_DIR": state, "PYTHONUNBUFFERED": "1"},
    ) as up:
        assert up.stdout is not None
        for line in up.stdout:
            lines.append(line)
            if stage := stage_of(line):
                seconds[stage] = time.monotonic() - began
            if line.startswith("Ready: "):
                url = line.split()[1].removesuffix("/v1")
    if up.returncode or not url:
        raise SplitserveError(f"splitserve {' '.join(arguments)}: {''.join(lines)[-2000:]}")
    body = {"model": Path(model).name, "prompt": "The first words", "max_tokens": 4, "stream": True}
    [record] = asyncio.run(run_load(Endpoint(url), [body], [0.0]))
    if record.error:
        raise SplitserveError(f"the first request failed: {record.error}")
    seconds["answer"] = time.monotonic() - began
    began = time.monotonic()
    run_command(state, "down")
    seconds["down"] = time.monotonic() - began
    return seconds


def traces(state: str) -> list[str]:
    """Describe leftovers of clusters of this state folder, and shared memory that no process uses."""
    found = [f"{path} is there" for path in (Path(state), *abandoned()) if path.exists()]
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("SPLITSERVE_STATE_DIR") == state and process.pid != os.getpid()
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} runs: {' '.join(process.cmdline())[:100]}")
        except psutil.Error:  # gone, or another user's
            continue
    return found


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
                print(
                    "Ray" if ray else "local", {name: round(value, 1) for name, value in runs[-1].items()}, flush=True
                )
            medians = {name: statistics.median(run[name] for run in runs) for name in STAGES if name in runs[0]}
            results.append({"place": "Ray" if ray else "local", "limit": LIMIT_SECONDS[ray], **medians, "runs": runs})
            if options.check_times and medians["answer"] > LIMIT_SECONDS[ray]:
                problems.append(f"an answer took {medians['answer']:.1f} s, more than {LIMIT_SECONDS[ray]:g} s")
    rows = [[each["place"], *(_shown(each.get(name)) for name in STAGES), each["limit"]] for each in results]
    print(table(rows, ["place", *(f"{name} s" for name in STAGES), "limit s"]))
    for problem in problems:
        print(f"FAIL {problem}")
    data = {"options": vars(options), "results": results, "problems": problems}
    keep_result("up", argv, data, options)
    return 1 if problems else 0


def _model(directory: Path, shape: str) -> str:
    return str(write_named_config(directory, shape) if shape else write_demo_model(directory))


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else ""
