"""``splitserve bench engine-loop``: what the host adds to the steps of a GPU, without one.

    client ---------------ZMQ--> engine loop of a worker      arm "direct"
    client --HTTP--> router --ZMQ--> the same                 arm "http"

Each arm runs with the next step launched late, just in time, and early, as soon as the one before it runs.

The worker is a real one whose device is a clock (:mod:`.paced_worker`): its steps take 6.5 ms by default, as those of
64 sequences of an 8B model on an H200 (``benchmarks/results``). ``--streams`` requests run at once. Figures: the share
of time in which the device had work, how long it waited for the next step, processor time of the worker's loop per step
and of the router per token, and the gaps between tokens as the client saw them. Processor times are what a busy machine
disturbs least.
In a second run of the direct arm ``--newcomers`` short requests come one after the other, at any time of a step; "join"
is how long each took to its first token.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
import zmq

from splitserve.benchmarks.arguments import finite, not_negative, positive, positive_seconds
from splitserve.benchmarks.bench_children import child_process, next_line, write_router_model
from splitserve.benchmarks.load import Endpoint, run_load
from splitserve.benchmarks.paced_worker import DeviceReport
from splitserve.benchmarks.report import add_result_options, keep_result, table
from splitserve.benchmarks.stats import RequestRecord, percentiles_ms, summarise
from splitserve.benchmarks.workload import token_prompts
from splitserve.config import RouterConfig
from splitserve.errors import ConfigError
from splitserve.messages import (
    Body,
    Envelope,
    LocalRequest,
    PeerRef,
    Register,
    Registered,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.orchestration.command_parser import CommandParser
from splitserve.orchestration.launcher import probe_ready
from splitserve.request import Party, RequestKey, SamplingParams
from splitserve.wire import decode, encode

MODEL_ID = "paced"
_READY_SECONDS = 60
_WORKER_MODULE = "splitserve.benchmarks.paced_worker"
_ROUTER_MODULE = "splitserve.benchmarks.router_process"


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
        help="when the next step is launched",
    )
    add("--newcomers", type=not_negative, default=60, metavar="N", help="short requests that come while the others run")
    add("--repeat", type=positive, default=1, help="runs of each arm")
    add("--streams", type=positive, default=64, help="requests at once")
    add("--input-len", type=positive, default=1024, metavar="TOKENS", help="of each prompt")
    add("--output-len", type=positive, default=512, metavar="TOKENS", help="of each answer")
    add("--step-ms", type=positive_seconds, default=6.5, help="of a decode step on the device")
    add("--launch-us", type=finite, default=300.0, help="host time that a launch takes")
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
    arguments += ["--late-launch" if launch == "late" else "--no-late-launch"]
    with child_process(_WORKER_MODULE, *arguments) as worker:
        yield worker


def _device_report(worker: "subprocess.Popen[str]") -> dict[str, Any]:
    """End the worker and read what it says of its device."""
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


class DirectRouter:
    """As little of a router as a worker needs: accepts its registration, sends requests, notes when tokens come."""

    def __init__(self) -> None:
        self._party = Party("bench", os.getpid())
        self._context = zmq.Context()
        self._membership = self._context.socket(zmq.ROUTER)
        self._membership.bind("tcp://127.0.0.1:*")
        self.membership = self._membership.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._requests = self._context.socket(zmq.DEALER)
        self._worker = self._party

    def __enter__(self) -> "DirectRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self._membership.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()

    def meet(self, worker: PeerRef) -> None:
        """Wait for the worker's registration and connect to it."""
        if not self._membership.poll(_READY_SECONDS * 1000):
            raise ConfigError(f"no worker registered within {_READY_SECONDS} s")
        identity, payload = self._membership.recv_multipart()
        assert isinstance(decode(payload).body, Register)
        self._membership.send_multipart([identity, encode(Envelope(self._party, worker.party, Registered()))])
        self._worker = worker.party
        self._requests.connect(worker.endpoint)

    def send(self, body: Body) -> None:
        self._requests.send(encode(Envelope(self._party, self._worker, body)))

    def receive(self) -> Body:
        """The worker's next message. Raises :class:`ConfigError` if none comes for a while."""
        if not self._requests.poll(_READY_SECONDS * 1000):
            raise ConfigError(f"the worker said nothing for {_READY_SECONDS} s")
        return decode(self._requests.recv()).body

    def run(self, prompts: Sequence[list[int]], output_len: int) -> list[RequestRecord]:
        """All prompts at once. Raises :class:`ConfigError` if one fails."""
        records = {f"r{index}": RequestRecord(due_seconds=0.0) for index in range(len(prompts))}
        start = time.perf_counter()
        for request_id, prompt in zip(records, prompts, strict=True):
            self._request(request_id, prompt, output_len)
        num_open = len(records)
        while num_open:
            deltas = self._deltas()
            now = time.perf_counter() - start
            for delta in deltas:
                record = records[delta.key.request_id]
                record.chunk_seconds.append(now)
                record.output_tokens += len(delta.token_ids)
                record.end_seconds = now
                num_open -= delta.finish_reason is not None
        return list(records.values())

    def joins(self, prompts: Sequence[list[int]], output_len: int, count: int) -> list[float]:
        """Seconds to the first token of each of up to ``count`` newcomers, one at a time while ``prompts`` run."""
        for index, prompt in enumerate(prompts):
            self._request(f"s{index}", prompt, output_len)
        waiting = {f"s{index}" for index in range(len(prompts))}
        while waiting:  # until all of them decode
            waiting -= {delta.key.request_id for delta in self._deltas()}
        pauses, seconds, num_open = random.Random(0), list[float](), len(prompts)
        while len(seconds) < count and num_open == len(prompts):
            due = time.perf_counter() + pauses.uniform(0.01, 0.03)
            while (left := due - time.perf_counter()) > 0.0:
                if self._requests.poll(math.ceil(left * 1e3)):
                    num_open -= sum(delta.finish_reason is not None for delta in self._deltas())
            newcomer, sent = f"n{len(seconds)}", time.perf_counter()
            self._request(newcomer, prompts[0][:8], 1)
            while all(delta.key.request_id != newcomer for delta in self._deltas()):
                pass
            seconds.append(time.perf_counter() - sent)
        return seconds

    def _request(self, request_id: str, prompt: list[int], output_len: int) -> None:
        sampling = SamplingParams(max_tokens=output_len)
        self.send(LocalRequest(RequestKey(request_id), array("i", prompt), sampling, 600.0))

    def _deltas(self) -> Sequence[TokenDelta]:
        """The next tokens of any request. Raises :class:`ConfigError` for one that failed."""
        body = self.receive()
        if isinstance(body, RequestFailed):
            raise ConfigError(f"request {body.key} failed: {body.message}")
        assert isinstance(body, StepTokens)
        return body.deltas

    def heard_by_membership(self) -> list[Body]:
        """What the worker has told membership since its registration was answered."""
        heard = []
        while self._membership.poll(0):
            heard.append(decode(self._membership.recv_multipart()[-1]).body)
        return heard


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
    deadline = time.monotonic() + _READY_SECONDS
    while not probe_ready(url)[0]:
        if time.monotonic() > deadline:
            raise ConfigError(f"{url}/ready isn't within {_READY_SECONDS} s")
        time.sleep(0.05)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
