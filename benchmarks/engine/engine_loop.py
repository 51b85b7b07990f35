"""``splitserve bench engine-loop``: host overhead of a GPU's steps, measured without a GPU.

    client ---------------ZMQ--> engine loop of a worker      arm "direct"
    client --HTTP--> router --ZMQ--> the same                 arm "http"

Each arm runs with the next step launched late, just in time, and early, as soon as the previous one runs.

The worker is a real one whose device is a timer (:mod:`.paced_worker`): its steps take 6.5 ms by default, like those of
64 sequences of an 8B model on an H200 (``benchmarks/results``). ``--streams`` requests run at once. Figures: the share
of time in which the device had work, the time that it waited for the next step, processor time of the worker's loop per
step and of the router per token, and the gaps between tokens as the client saw them. A busy machine disturbs processor
times least. In a second run of the direct arm ``--newcomers`` short requests come one after the other, at any time of a
step; "join" is the time of each to its first token.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from splitserve.benchmarks.common.arguments import finite, not_negative, positive, positive_seconds
from splitserve.benchmarks.common.children import child_process, next_line, write_router_model
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import percentiles_ms, summarise
from splitserve.benchmarks.engine.direct_router import READY_SECONDS, DirectRouter
from splitserve.benchmarks.engine.paced_runner import DeviceReport
from splitserve.benchmarks.serving.load import Endpoint, run_load
from splitserve.benchmarks.serving.workload import token_prompts
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cluster.launcher import probe_ready
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.requests import PeerRef

MODEL_ID = "paced"
_WORKER_MODULE = "splitserve.benchmarks.engine.paced_worker"
_ROUTER_MODULE = "splitserve.benchmarks.router.process"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that ``argv`` describes. Raises :class:`ConfigError` if something didn't start."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    arms = {"direct": _direct, "http": _http}
    runs = itertools.product(range(options.repeat), options.arms, options.launch)
    rows = [{"launch": launch, **arms[name](options, launch)} for _, name, launch in runs]
    headers = [
        "arm",
        "launch",
        "steps",
        "busy %",
        "idle p50",
        "idle p99",
        "loop us/step",
        "worker us/step",
        "router us/token",
    ]
    print(table([_cells(row) for row in rows], [*headers, "ITL p50", "ITL p99", "ITL max", "join p50", "join p99"]))
    print("idle, ITL and join in milliseconds; us: microseconds of processor time")
    keep_result("engine-loop", arguments, {"results": rows}, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="splitserve bench engine-loop",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", nargs="+", choices=("direct", "http"), default=["direct", "http"], help="what to measure")
    add(
        "--launch",
        nargs="+",
        choices=("late", "early"),
        default=["late", "early"],
        help="time at which the next step is launched",
    )
    add("--newcomers", type=not_negative, default=60, metavar="N", help="short requests that come while the others run")
    add("--repeat", type=positive, default=1, help="runs of each arm")
    add("--streams", type=positive, default=64, help="requests at once")
    add("--input-len", type=positive, default=1024, metavar="TOKENS", help="length of each prompt")
    add("--output-len", type=positive, default=512, metavar="TOKENS", help="length of each answer")
    add("--step-ms", type=positive_seconds, default=6.5, help="time of a decode step on the device")
    add("--launch-us", type=finite, default=300.0, help="host time to launch a forward pass")
    add("--draws-us", type=finite, default=300.0, help="host time to launch the draws of a step")
    add_result_options(parser, always=True)
    return parser


def _cells(row: dict[str, Any]) -> list[object]:
    device, itl = row["device"], row["itl_ms"]
    return [
        row["arm"],
        row["launch"],
        device["steps"],
        100.0 * device["busy_share"],
        device["idle_ms"]["p50"],
        device["idle_ms"]["p99"],
        device["loop_cpu_us"],
        device["process_cpu_us"],
        row.get("router_cpu_us_per_token", "-"),
        *(itl.get(which, "-") for which in ("p50", "p99", "max")),
        *(row.get("join_ms", {}).get(which, "-") for which in ("p50", "p99")),
    ]


@contextlib.contextmanager
def _worker(
    options: argparse.Namespace, launch: str, membership: str, vocab_size: int
) -> Iterator["subprocess.Popen[str]"]:
    arguments = ["--membership", membership, "--vocab-size", str(vocab_size), "--step-ms", str(options.step_ms)]
    arguments += ["--max-num-seqs", str(max(64, options.streams + 1)), "--launch-us", str(options.launch_us)]
    arguments += ["--draws-us", str(options.draws_us)]
    arguments += ["--late-launch" if launch == "late" else "--no-late-launch"]
    with child_process(_WORKER_MODULE, *arguments) as worker:
        yield worker


def _device_report(worker: "subprocess.Popen[str]") -> dict[str, Any]:
    """End the worker and read its report of its device."""
    worker.terminate()
    report = msgspec.json.decode(next_line(worker), type=DeviceReport | None)
    if report is None:
        raise ConfigError("too few steps had a full batch; raise --output-len")
    return msgspec.structs.asdict(report)


# ---- straight to the worker ----


def _direct(options: argparse.Namespace, launch: str) -> dict[str, Any]:
    with DirectRouter() as router, _worker(options, launch, router.membership, 1000) as worker:
        router.meet(msgspec.json.decode(next_line(worker), type=PeerRef))
        prompts = token_prompts(options.streams, options.input_len, 0, range(1000), seed=0)
        records = router.run(prompts, options.output_len)
        joins = router.joins(prompts, options.output_len, options.newcomers)
        return {
            "arm": "direct",
            "device": _device_report(worker),
            "itl_ms": summarise(records, None)["itl_ms"],
            "join_ms": percentiles_ms(joins),
        }


# ---- through HTTP ----


def _http(options: argparse.Namespace, launch: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        vocab_size = write_router_model(Path(folder))
        config = RouterConfig(model=folder, served_model_name=MODEL_ID, port=0)
        router = stack.enter_context(child_process(_ROUTER_MODULE, msgspec.json.encode(config).decode()))
        membership = json.loads(next_line(router))["endpoint"]
        url = json.loads(next_line(router))["url"]
        worker = stack.enter_context(_worker(options, launch, membership, vocab_size))
        next_line(worker)
        _wait_ready(url)
        bodies = [
            {
                "model": MODEL_ID,
                "prompt": prompt,
                "max_tokens": options.output_len,
                "stream": True,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for prompt in token_prompts(options.streams, options.input_len, 0, range(256), seed=0)
        ]
        process = psutil.Process(router.pid)
        before = _cpu_seconds(process)
        records = uvloop.run(run_load(Endpoint(url), bodies, [0.0] * len(bodies)))
        router_seconds = _cpu_seconds(process) - before
        figures = summarise(records, None)
        if figures["failed"]:
            raise ConfigError(f"requests failed: {figures['failed']}")
        return {
            "arm": "http",
            "device": _device_report(worker),
            "router_cpu_us_per_token": 1e6 * router_seconds / figures["output_tokens"],
            "itl_ms": figures["itl_ms"],
        }


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not probe_ready(url)[0]:
        if time.monotonic() > deadline:
            raise ConfigError(f"{url}/ready isn't within {READY_SECONDS} s")
        time.sleep(0.05)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
