"""What the router adds to a worker that answers at once: open-loop requests through it, and straight to the worker.

    client --HTTP--> router --ZMQ--> instant worker        arms "whole" and "stream"
    client --------------------ZMQ--> the same worker      arm "direct"

The three processes are the real ones (but for the worker's engine), and all arms run one after the other in one
run. A router arm's figure minus the direct arm's is what the router adds: HTTP, validation, tokenisation, placement,
one more hop, detokenisation, JSON. The client's own time is in it. The router's CPU time per request is the figure
that a busy machine disturbs least.

With ``--prompt-tokens`` instead: one request at a time, whose prompt is that many token ids, and what single stages of
such a request take, on the router and on a worker that has the whole prompt's KV.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop
import zmq

from splitserve.benchmarks.arguments import positive, positive_seconds
from splitserve.benchmarks.report import add_result_options, keep_result, table
from splitserve.benchmarks.stats import percentiles_ms
from splitserve.benchmarks.workload import arrival_seconds
from splitserve.block_hash import extend_hashes
from splitserve.config import RouterConfig
from splitserve.errors import ConfigError
from splitserve.kv_event_batch import DEVICE, KVEvent, KVEventBatch
from splitserve.kvconnector.block_pool import BlockPool
from splitserve.kvconnector.tier_index import TierIndex
from splitserve.kvconnector.tiers import CopyCommand, CopyResult, Tier, Tiers
from splitserve.messages import Envelope, LocalRequest, PeerRef, StepTokens
from splitserve.models.demo_tokenizer import QWEN_TOKENS, train_tokenizer
from splitserve.orchestration.command_parser import CommandParser
from splitserve.prefill.block_manager import BlockManager
from splitserve.prefill.sequence import Sequence as Request
from splitserve.request import Party, RequestKey, SamplingParams
from splitserve.router.links import LoopSocket
from splitserve.router.prefix_view import PrefixView, PromptHashes
from splitserve.router.schema import CompletionRequest, parse
from splitserve.token_ids import TokenIds
from splitserve.wire import decode, encode

MODEL_ID = "instant"
_SHORT_PROMPT = array("i", range(100))
_LONG_PROMPT_VOCABULARY = 128_000
_REPEATS = 20
_STAGE_BLOCK_SIZE = 64  # as on GPUs
_CHAT_PATH = "/v1/chat/completions"
_WARMUP_REQUESTS = 50
_READY_SECONDS = 30
_REQUEST_SECONDS = 60.0
_STREAM_LIMIT_BYTES = 16 << 20
_CHAT = "The prefill worker computes the prompt, the decode worker goes on from the first token. "


@dataclass(slots=True)
class Arm:
    """Latencies of one arm in seconds, and how late its requests were sent."""

    first_seconds: list[float] = field(default_factory=list)
    last_seconds: list[float] = field(default_factory=list)
    lag_seconds: list[float] = field(default_factory=list)
    num_failed: int = 0


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
    parser.add_argument("--output-tokens", type=positive, default=16, help="each in a message of its own")
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser


def _cells(row: dict[str, Any]) -> list[object]:
    added = row["added_ms"]
    return [
        row["arm"],
        f"{row['rate']:g}",
        row["requests"],
        *(row[which].get(share, "-") for which in ("first_ms", "last_ms") for share in ("p50", "p99")),
        *((added["p50"], added["p99"]) if added else ("", "")),
        row["router_cpu_ms"],
    ]


# ---- processes ----


@contextlib.contextmanager
def _processes(folder: Path, max_model_len: int = 4096, min_vocab_size: int = 0) -> Iterator[tuple[str, int, PeerRef]]:
    """A router and a worker as child processes; yields the router's URL and process id, and where the worker is."""
    vocab_size = max(min_vocab_size, write_router_model(folder))
    config = RouterConfig(model=str(folder), served_model_name=MODEL_ID, port=0)
    module = "splitserve.benchmarks.router_process"
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(child_process(module, msgspec.json.encode(config).decode()))
        membership = json.loads(next_line(router))["endpoint"]
        url = json.loads(next_line(router))["url"]
        worker_options = ["--membership", membership, "--tokens-per-message", "1"]
        worker_options += ["--vocab-size", str(vocab_size), "--max-model-len", str(max_model_len)]
        worker = stack.enter_context(child_process("splitserve.benchmarks.instant_worker", *worker_options))
        yield url, router.pid, msgspec.json.decode(next_line(worker), type=PeerRef)


@contextlib.contextmanager
def child_process(module: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise ConfigError(f"a child process ended with status {process.wait()} before it was ready")
    return line


def write_router_model(folder: Path) -> int:
    """What a router needs of a model: a tokenizer. Returns the size of its vocabulary."""
    tokenizer = train_tokenizer(2000, QWEN_TOKENS, seed=0)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": QWEN_TOKENS.eos, "chat_template": QWEN_TOKENS.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


# ---- long prompts ----


def _by_length(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """``--prompt-tokens``. Exit status 1 if a request failed."""
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
    """Milliseconds to the first token, through the router and straight from the worker."""
    host, port = url.removeprefix("http://").split(":")
    pool, direct = HttpPool(host, int(port)), DirectClient(worker, 1)
    body = _completion_body(prompt)
    arms = {"direct": Arm(), "router": Arm()}
    try:
        await _wait_ready(pool)
        for _ in range(_REPEATS + 1):
            await direct.call(arms["direct"], prompt)
            await pool.post("/v1/completions", body, arms["router"])
    finally:
        direct.close()
        pool.close()
    medians = {f"first token, {name}": _median_ms(arm.first_seconds[1:]) for name, arm in arms.items()}
    return medians | {"failed": sum(arm.num_failed for arm in arms.values())}


def _completion_body(prompt: TokenIds) -> bytes:
    body = {"model": MODEL_ID, "prompt": prompt.tolist(), "max_tokens": 1, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


def prompt_stages(prompt: TokenIds) -> dict[str, float]:
    """Median milliseconds of what is done with a prompt of token ids, in this process, by stage."""
    body, root, me = _completion_body(prompt), bytes(16), Party("w", 1)
    hashes: list[bytes] = []
    extend_hashes(hashes, root, prompt[:-1], _STAGE_BLOCK_SIZE)
    prefixes = PrefixView()
    events = [KVEvent("stored", DEVICE, hashes)]
    prefixes.apply(KVEventBatch(me.engine_id, me.incarnation, 0, _STAGE_BLOCK_SIZE, root, True, events))
    known = PromptHashes(prompt)
    prefixes.matches(known)
    envelope = Envelope(me, me, LocalRequest(RequestKey("r"), prompt, SamplingParams(max_tokens=1), 60.0))
    message = encode(envelope)
    return {
        "router: body": _time_ms(lambda: parse(CompletionRequest, body)),
        "router: hashes": _time_ms(lambda: prefixes.matches(PromptHashes(prompt))),
        "router: matches again": _time_ms(lambda: prefixes.matches(known)),
        "message out": _time_ms(lambda: encode(envelope)),
        "message in": _time_ms(lambda: decode(message)),
        "worker: device hit": _hit_ms(prompt, hashes, root, in_host_tier=False),
        "worker: host tier hit": _hit_ms(prompt, hashes, root, in_host_tier=True),
    }


def _hit_ms(prompt: TokenIds, hashes: Sequence[bytes], root: bytes, *, in_host_tier: bool) -> float:
    """From a request's tokens to its first chunk, copies taking no time, where all KV but the last block's is there."""
    num_blocks = len(hashes) + 1
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    index = TierIndex(num_blocks)
    blocks = BlockManager(pool, _STAGE_BLOCK_SIZE, root, Tiers(pool, [Tier("host", index)]))
    contents = [(block_hash, slot) for slot, block_hash in enumerate(hashes)]
    index.adopt(contents)

    def begin() -> Request:
        sampling = SamplingParams(max_tokens=1)
        sequence = Request(RequestKey("r"), Party("router", 1), prompt[:], len(prompt), sampling, 60.0)
        blocks.would_load(sequence)
        assert blocks.reserve(sequence), "room for the whole prompt"
        for command in blocks.tiers.take_commands():
            assert isinstance(command, CopyCommand), "a copy from the host tier"
            blocks.tiers.on_result(CopyResult(command.copy_id, len(command.block_ids)))
        if sequence.load is not None:
            blocks.finish_load(sequence)
        sequence.chunk(sequence.num_remaining, _STAGE_BLOCK_SIZE)
        return sequence

    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        sequence = begin()
        seconds.append(time.perf_counter() - start)
        assert sequence.num_cached_tokens == len(hashes) * _STAGE_BLOCK_SIZE, "all of it was there"
        blocks.give_back(sequence)
        if in_host_tier:
            pool.clear_prefix_index()
    return _median_ms(seconds[1:])


def _time_ms(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return _median_ms(seconds[1:])


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


# ---- load ----


async def _measure(options: argparse.Namespace, url: str, router_pid: int, worker: PeerRef) -> list[dict[str, Any]]:
    text = (_CHAT * (options.prompt_chars // len(_CHAT) + 1))[: options.prompt_chars]
    host, port = url.removeprefix("http://").split(":")
    pool = HttpPool(host, int(port))
    direct = DirectClient(worker, options.output_tokens)
    router = psutil.Process(router_pid)
    try:
        await _wait_ready(pool)
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
    """Send each request when it is due, whatever became of the ones before."""
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
        "added_ms": {share: last_ms[share] - base[share] for share in last_ms} if base else {},
    }


def _chat_body(text: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL_ID, "messages": messages, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    return json.dumps(body).encode()


async def _wait_ready(pool: "HttpPool") -> None:
    end = time.monotonic() + _READY_SECONDS
    while await pool.get("/ready") != 200:
        if time.monotonic() > end:
            raise ConfigError(f"the worker wasn't ready after {_READY_SECONDS} s")
        await asyncio.sleep(0.05)


class HttpPool:
    """Kept-alive HTTP/1.1 connections, with as little of a client's own work as can be."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> int:
        """The status of a GET."""
        return (await self._exchange(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()))[0]

    async def post(self, path: str, body: bytes, arm: Arm) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                status, first = await self._exchange(head.encode() + body)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            status = 0
        if status != HTTPStatus.OK:
            arm.num_failed += 1
            return
        arm.first_seconds.append(first - start)
        arm.last_seconds.append(time.perf_counter() - start)

    async def _exchange(self, request: bytes) -> tuple[int, float]:
        """Status, and when the head of the answer was there; returns at the answer's end."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(*self._address, limit=_STREAM_LIMIT_BYTES)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        first = time.perf_counter()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await (reader.readexactly(int(length)) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
        self._idle.append((reader, writer))
        return int(head[9:12]), first

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class DirectClient:
    """Requests straight to the worker, over the same kind of socket as the router's."""

    def __init__(self, worker: PeerRef, output_tokens: int) -> None:
        self._worker = worker.party
        self._party = Party("bench", os.getpid())
        self._waiting: dict[str, tuple[float, Arm, asyncio.Future[None]]] = {}
        self._sampling = SamplingParams(max_tokens=output_tokens)
        self._num_sent = 0
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # an open loop: a request goes out however many wait
        socket.connect(worker.endpoint)
        self._socket = LoopSocket(socket, self._on_frames)

    async def call(self, arm: Arm, prompt: TokenIds = _SHORT_PROMPT) -> None:
        request_id = f"direct-{self._num_sent}"
        self._num_sent += 1
        done = asyncio.get_running_loop().create_future()
        body = LocalRequest(RequestKey(request_id), prompt, self._sampling, 60.0)
        start = time.perf_counter()
        self._waiting[request_id] = (start, arm, done)
        self._socket.send([encode(Envelope(self._party, self._worker, body))])
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await done
        except TimeoutError:
            del self._waiting[request_id]
            arm.num_failed += 1

    def _on_frames(self, frames: list[bytes]) -> None:
        body = decode(frames[0]).body
        now = time.perf_counter()
        if not isinstance(body, StepTokens):
            return
        for delta in body.deltas:
            if delta.key.request_id not in self._waiting:  # given up
                continue
            start, arm, done = self._waiting[delta.key.request_id]
            if delta.position == 0:
                arm.first_seconds.append(now - start)
            if delta.finish_reason is not None:
                arm.last_seconds.append(now - start)
                del self._waiting[delta.key.request_id]
                done.set_result(None)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


if __name__ == "__main__":
    sys.exit(main())
