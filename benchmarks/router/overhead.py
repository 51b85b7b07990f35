"""Overhead of the router over a worker that answers at once: open-loop requests through it, and straight to the worker.

    client --HTTP--> router --ZMQ--> instant worker        arms "whole" and "stream"
    client --------------------ZMQ--> the same worker      arm "direct"

The three processes are the real ones (except for the worker's engine), and all arms run one after the other in one run.
A router arm's figure minus the direct arm's is the router's overhead: HTTP, validation, tokenisation, placement, one
more hop, detokenisation, JSON. It includes the client's own time. A busy machine disturbs the router's CPU time per
request least.

With ``--prompt-tokens`` instead: one request at a time, whose prompt is that many token ids, and the times of single
stages of such a request, on the router and on a worker that has the whole prompt's KV.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop

from splitserve.benchmarks.common.arguments import positive, positive_seconds
from splitserve.benchmarks.common.children import child_process, next_line, write_router_model
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.benchmarks.router.clients import Arm, DirectClient, HttpPool, wait_ready
from splitserve.benchmarks.router.stages import MODEL_ID, REPEATS, completion_body, median_ms, prompt_stages
from splitserve.benchmarks.serving.workload import arrival_seconds
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.token_ids import TokenIds

_LONG_PROMPT_VOCABULARY = 128_000
_CHAT_PATH = "/v1/chat/completions"
_WARMUP_REQUESTS = 50
_CHAT = "The prefill worker computes the prompt, the decode worker goes on from the first token. "


Call = Callable[[Arm], Coroutine[Any, Any, None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that ``argv`` describes; exit status 1 if a request failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if min(options.rate) * options.seconds < 1:
        raise ConfigError("no request arrives: raise --rate or --seconds")
    if options.prompt_tokens:
        return _by_length(options, arguments)
    with tempfile.TemporaryDirectory() as folder, _processes(Path(folder)) as (url, router_pid, worker):
        rows = uvloop.run(_measure(options, url, router_pid, worker))
    headers = [
        "arm",
        "req/s",
        "requests",
        "failed",
        "first p50",
        "first p99",
        "last p50",
        "last p99",
        "added p50",
        "added p99",
        "cpu/req",
    ]
    print(table([_cells(row) for row in rows], headers))
    print("milliseconds; first = first token, last = end of the answer, added = last minus the direct arm's")
    keep_result("router", arguments, {"results": rows}, options)
    return 1 if any(row["failed"] for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench router", description=__doc__)
    parser.add_argument("--rate", type=positive_seconds, nargs="+", default=[100.0, 300.0], help="requests per second")
    parser.add_argument("--seconds", type=positive_seconds, default=10.0, help="length of each arm")
    parser.add_argument("--arrival", choices=["poisson", "fixed"], default="poisson")
    parser.add_argument("--prompt-chars", type=positive, default=400)
    parser.add_argument(
        "--prompt-tokens", type=positive, nargs="+", help="lengths of prompts of token ids, one at a time"
    )
    parser.add_argument(
        "--output-tokens", type=positive, default=16, help="tokens of each answer, each in a message of its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser


def _cells(row: dict[str, Any]) -> list[object]:
    added = row["added_ms"]
    return [
        row["arm"],
        f"{row['rate']:g}",
        row["requests"],
        row["failed"],
        *(row[which].get(share, "-") for which in ("first_ms", "last_ms") for share in ("p50", "p99")),
        *((added["p50"], added["p99"]) if added else ("", "")),
        row["router_cpu_ms"],
    ]


# ---- processes ----


@contextlib.contextmanager
def _processes(folder: Path, max_model_len: int = 4096, min_vocab_size: int = 0) -> Iterator[tuple[str, int, PeerRef]]:
    """Start a router and a worker as child processes; yields the router's URL and process id, and the worker's
    address."""
    vocab_size = max(min_vocab_size, write_router_model(folder))
    config = RouterConfig(model=str(folder), served_model_name=MODEL_ID, port=0)
    module = "splitserve.benchmarks.router.process"
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(child_process(module, msgspec.json.encode(config).decode()))
        membership = json.loads(next_line(router))["endpoint"]
        url = json.loads(next_line(router))["url"]
        worker_options = ["--membership", membership, "--tokens-per-message", "1"]
        worker_options += ["--vocab-size", str(vocab_size), "--max-model-len", str(max_model_len)]
        worker = stack.enter_context(child_process("splitserve.benchmarks.router.instant_worker", *worker_options))
        yield url, router.pid, msgspec.json.decode(next_line(worker), type=PeerRef)


# ---- long prompts ----


def _by_length(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run ``--prompt-tokens``. Exit status 1 if a request failed."""
    rows: list[dict[str, Any]] = []
    max_model_len = max(options.prompt_tokens) + 1024
    with (
        tempfile.TemporaryDirectory() as folder,
        _processes(Path(folder), max_model_len, _LONG_PROMPT_VOCABULARY) as (url, _, worker),
    ):
        for num_tokens in options.prompt_tokens:
            rng = random.Random(options.seed)
            prompt = array("i", (rng.randrange(_LONG_PROMPT_VOCABULARY) for _ in range(num_tokens)))
            row = {"tokens": num_tokens, **uvloop.run(_one_at_a_time(prompt, url, worker)), **prompt_stages(prompt)}
            rows.append(row)
    names = [name for name in rows[0] if name not in ("tokens", "failed")]
    cells = [[name, *(row[name] for row in rows)] for name in names]
    print(table(cells, ["median ms", *(f"{row['tokens']} tokens" for row in rows)]))
    print("first token, router: from the POST, with the client's own time; direct: from the message to the worker")
    keep_result("router-prompts", arguments, {"results": rows}, options)
    return 1 if any(row["failed"] for row in rows) else 0


async def _one_at_a_time(prompt: TokenIds, url: str, worker: PeerRef) -> dict[str, Any]:
    """Measure milliseconds to the first token, through the router and straight from the worker."""
    host, port = url.removeprefix("http://").split(":")
    pool, direct = HttpPool(host, int(port)), DirectClient(worker, 1)
    body = completion_body(prompt)
    arms = {"direct": Arm(), "router": Arm()}
    try:
        await wait_ready(pool)
        for _ in range(REPEATS + 1):
            await direct.call(arms["direct"], prompt)
            await pool.post("/v1/completions", body, arms["router"])
    finally:
        direct.close()
        pool.close()
    medians = {f"first token, {name}": median_ms(arm.first_seconds[1:]) for name, arm in arms.items()}
    return medians | {"failed": sum(arm.num_failed for arm in arms.values())}


# ---- load ----


async def _measure(options: argparse.Namespace, url: str, router_pid: int, worker: PeerRef) -> list[dict[str, Any]]:
    text = (_CHAT * (options.prompt_chars // len(_CHAT) + 1))[: options.prompt_chars]
    host, port = url.removeprefix("http://").split(":")
    pool = HttpPool(host, int(port))
    direct = DirectClient(worker, options.output_tokens)
    router = psutil.Process(router_pid)
    try:
        await wait_ready(pool)
        calls: dict[str, Call] = {
            "direct": direct.call,
            "whole": lambda arm: pool.post(_CHAT_PATH, _chat_body(text, options.output_tokens, stream=False), arm),
            "stream": lambda arm: pool.post(_CHAT_PATH, _chat_body(text, options.output_tokens, stream=True), arm),
        }
        for call in calls.values():
            await asyncio.gather(*(call(Arm()) for _ in range(_WARMUP_REQUESTS)))
        rows = []
        for rate in options.rate:
            base: dict[str, float] = {}
            for name, call in calls.items():
                due = arrival_seconds(int(rate * options.seconds), rate, options.arrival, options.seed)
                cpu_before = _cpu_seconds(router)
                arm = await _open_loop(call, due)
                cpu_ms = 1e3 * (_cpu_seconds(router) - cpu_before) / len(due)
                row = _row(name, rate, arm, base) | {"router_cpu_ms": cpu_ms}
                base = base or row["last_ms"]
                rows.append(row)
        return rows
    finally:
        direct.close()
        pool.close()


async def _open_loop(call: Call, due_seconds: Sequence[float]) -> Arm:
    """Send each request when it is due, whether or not earlier ones are done."""
    arm = Arm()
    loop = asyncio.get_running_loop()
    start = loop.time() + 0.1
    tasks: list[asyncio.Task[None]] = []
    for due in due_seconds:
        delay = start + due - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        arm.lag_seconds.append(loop.time() - start - due)
        tasks.append(asyncio.create_task(call(arm)))
    await asyncio.gather(*tasks)
    return arm


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _row(name: str, rate: float, arm: Arm, base: dict[str, float]) -> dict[str, Any]:
    last_ms = percentiles_ms(arm.last_seconds)
    return {
        "arm": name,
        "rate": rate,
        "requests": len(arm.last_seconds),
        "failed": arm.num_failed,
        "first_ms": percentiles_ms(arm.first_seconds),
        "last_ms": last_ms,
        "lag_ms": percentiles_ms(arm.lag_seconds),
        "added_ms": {name: last_ms[name] - base[name] for name in last_ms if name != "count"} if base else {},
    }


def _chat_body(text: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL_ID, "messages": messages, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    return json.dumps(body).encode()


if __name__ == "__main__":
    sys.exit(main())
