"""Timelines of real requests: stages against the router's and the client's time to first token. Not a test module.

    python tests/support/timeline_runs.py ARRANGEMENT [--requests N]

    1P1D, 2P2D   requests at half of the rate that eight clients at once reach; every fourth repeats a prompt
    kills        2P2D; workers are killed all the time, so that attempts are repeated and streams migrate
    tiers        1P1D with little KV memory, a host tier and an LMCache server; prompts come again
    shifted      1P1D; the prefill worker's clock is 50 ms ahead of the router's, the decode worker's 50 ms behind

Of each request the stages must add up to the router's time to first token, none of them negative; in the first two
arrangements 95% of the times that a client takes at its socket must be within 1% or 1 ms of that time. Exit status 1 if
not. With SPLITSERVE_FIGURES set, figures of the run go to that file: among them the time from the client's send to the
router's first stage (the kernel's and the event loop's: no stage sees it) and from the router's write to the client's
socket.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lmcache_metrics import CHUNK_TOKENS, availability
from serving import PATIENT, wait_until_quiet
from small_clusters import BLOCK_SIZE, SHAPES
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.cluster_spec import LMCacheSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import RequestTrace, RequestTraces
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from tier_chats import BLOCK_BYTES, SMALL_POOL
from waiting import PATIENCE_SECONDS, wait_until

ADDS_UP_SECONDS = 5e-5
CLIENT_SHARE, CLIENT_SECONDS, MAX_LATE = 0.01, 1e-3, 0.05
CAUSALITY_SECONDS = 0.02  # far below twice the shift of clocks, and above what is left of it
NUM_CLIENTS = 8
WARM_UP = 24
KILL_PAUSE_SECONDS = 1.0
HASTY = ProtocolConfig(heartbeat_seconds=0.25, dead_after_seconds=3.0, lease_seconds=3.0, read_deadline_seconds=3.0)


@dataclass(frozen=True)
class Arrangement:
    """A cluster, and what happens to it."""

    shape: str
    compares_clients: bool = False  # requests come at half load
    kills: bool = False
    has_tiers: bool = False
    is_shifted: bool = False
    max_tokens: int = 12


ARRANGEMENTS = {
    "1P1D": Arrangement("1P1D", compares_clients=True),
    "2P2D": Arrangement("2P2D", compares_clients=True),
    "kills": Arrangement("2P2D", kills=True, max_tokens=100),
    "tiers": Arrangement("1P1D", has_tiers=True),
    "shifted": Arrangement("1P1D", is_shifted=True),
}


@dataclass
class Run:
    """The outcome of a run. ``problems``: one line per request whose timeline is wrong."""

    figures: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    beside_stages: list[dict[str, Any]] = field(default_factory=list)  # of arrangements that compare clients

    def check(self, trace: RequestTrace) -> None:
        """Check the stages of a request, and count what it lived through."""
        summary, name = trace.summary, trace.summary.request_id
        for stages in (summary.ttft_stages, summary.handover_stages):
            if any(seconds < 0 for seconds in stages.values()):
                self.problems.append(f"{name}: a stage is negative: {stages}")
        if summary.ttft_seconds is not None:
            rest = abs(sum(summary.ttft_stages.values()) - summary.ttft_seconds)
            if rest > ADDS_UP_SECONDS:
                self.problems.append(f"{name}: {rest} s are missing from {summary.ttft_stages}")
        if any(span.seconds < 0 for span in trace.spans):
            self.problems.append(f"{name}: a span is negative")
        unexplained = summary.ttft_stages.get("unexplained", 0.0)
        self.figures["requests"] += 1
        self.figures["with several attempts"] += summary.num_attempts > 1
        self.figures["continued after their first token"] += _has_migrated(trace)
        self.figures["with cached tokens"] += summary.num_cached_tokens > 0
        self.figures["disaggregated"] += summary.actual == "disaggregated"
        self.figures["local"] += summary.actual == "local"
        self.figures[summary.status] += 1
        self.figures["with more than 1 ms unexplained"] += unexplained > 1e-3

    def check_order(self, trace: RequestTrace) -> None:
        """Check that effects come after their causes in other processes of an attempt, whatever the clocks show."""
        ends: dict[tuple[str, str], float] = {}
        for span in trace.spans:
            if span.name == "attempt":
                self._check_order(trace.summary.request_id, ends)
                ends = {}
            ends[span.process.partition("-")[0], span.name] = span.begin + span.seconds
        self._check_order(trace.summary.request_id, ends)

    def _check_order(self, request_id: str, ends: dict[tuple[str, str], float]) -> None:
        """Check one attempt, whose spans end so."""
        for cause, effect in (
            (("prefill", "turn_wait"), ("decode", "await_turn")),
            (("decode", "reserve"), ("prefill", "grant_wait")),
            (("prefill", "chunk"), ("decode", "verify")),
            (("prefill", "chunk"), ("decode", "await_last_offer")),
        ):
            if cause in ends and effect in ends and ends[effect] < ends[cause] - CAUSALITY_SECONDS:
                self.problems.append(f"{request_id}: {effect} ends before {cause}: {ends}")

    def compare_clients(
        self, name: str, traces: dict[int, RequestTrace], times: dict[int, tuple[float, float]]
    ) -> None:
        """Compare the times to first token with those that clients measured: when they sent and had an event."""
        late, unix_offset = 0, time.time() - time.monotonic()
        before, after, ttfts = [], [], []
        for number, trace in traces.items():
            ttft = trace.summary.ttft_seconds
            if ttft is None or number not in times:
                late += 1
                continue
            sent_at, first_event_at = times[number]
            seen, arrived_at = first_event_at - sent_at, trace.began_at - unix_offset
            late += abs(seen - ttft) > max(CLIENT_SHARE * seen, CLIENT_SECONDS)
            before.append(arrived_at - sent_at)
            after.append(first_event_at - arrived_at - ttft)
            ttfts.append(seen)
        found = {"client's ttft": ttfts, "send to arrival": before, "write to client": after}
        self.beside_stages.append(
            {"arrangement": name, **{f"{each} ms, p50 p95 max": _quantiles(values) for each, values in found.items()}}
        )
        self.figures["clients compared"] += len(traces)
        self.figures["clients beyond 1% and 1 ms"] += late
        if late > MAX_LATE * len(traces):
            self.problems.append(f"{late} of {len(traces)} clients saw another time to first token")


def _quantiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds) or [0.0]
    last = len(ordered) - 1
    return [round(1e3 * ordered[at], 3) for at in (last // 2, int(0.95 * last), last)]


def _has_migrated(trace: RequestTrace) -> bool:
    """Return whether an attempt began after the first token."""
    ttft = trace.summary.ttft_seconds
    return ttft is not None and any(span.name == "attempt" and span.begin > ttft for span in trace.spans)


@contextmanager
def running(arrangement: Arrangement, model: Path) -> Iterator[LocalCluster]:
    """Run the arrangement's cluster."""
    memory, more = 64 << 20, {}
    engine = EngineConfig(
        model=str(model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=memory, max_model_len=512,
        max_num_batched_tokens=128, threads=1,
    )  # fmt: skip
    if arrangement.has_tiers:
        engine = msgspec.structs.replace(engine, kv_memory_bytes=SMALL_POOL, host_kv_memory_bytes=20 * BLOCK_BYTES)
        more["lmcache"] = LMCacheSpec(memory="64MiB", chunk_tokens=CHUNK_TOKENS)
    spec = simple_spec(
        engine, port=0, protocol=HASTY if arrangement.kills else PATIENT, **SHAPES[arrangement.shape], **more
    )
    entries = Entries(worker="shifted_worker:run_worker") if arrangement.is_shifted else Entries()
    environment = {"PYTHONPATH": str(Path(__file__).parent)} if arrangement.is_shifted else {}
    cluster = LocalCluster(spec, log_level="error", entries=entries, environment=environment)
    with cluster, cluster.supervised():
        if arrangement.has_tiers:
            wait_until(lambda: set(availability(cluster.url).values()) == {True}, "LMCache isn't there")
        yield cluster


class Requests:
    """The requests of a run: their prompts and the clients' times. Every fourth one repeats an earlier prompt."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.url = url
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), address.port
        self._model = model

    def prompt(self, number: int) -> list[int]:
        """Return a prompt of 32 to 400 tokens."""
        chosen = random.Random(number - 11 if number % 4 == 3 and number >= 11 else number)
        return [chosen.randrange(300, 1500) for _ in range(chosen.randrange(32, 400))]

    def message(self, number: int) -> tuple[str, str]:
        """Return the head and the body of a request."""
        body = {
            "model": self._model, "prompt": self.prompt(number), "max_tokens": self._max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        content = json.dumps(body)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {_id(number)}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        return head, content

    def stream(self, number: int) -> None:
        """Send a request, and read its stream to the end."""
        message = "".join(self.message(number)).encode()
        with socket.create_connection((self._host, self._port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(message)
            while connection.recv(65536):
                pass

    def stream_from_another_process(self, numbers: range, per_second: float) -> dict[int, tuple[float, float]]:
        """Send requests at random times; return when each was sent and had its first event, at the client's socket."""
        chosen, after, requests = random.Random(numbers.start), 0.0, []
        for number in numbers:
            after += chosen.expovariate(per_second)
            head, body = self.message(number)
            requests.append({"after": after, "head": head, "body": body})
        given = json.dumps({"host": self._host, "port": self._port, "requests": requests})
        client = str(Path(__file__).with_name("socket_client.py"))
        done = subprocess.run([sys.executable, client], input=given, capture_output=True, text=True, check=True)
        return {number: tuple(times) for number, times in zip(numbers, json.loads(done.stdout), strict=True) if times}

    def trace(self, number: int) -> RequestTrace | None:
        """Return the router's trace of a request that has ended; None if it never began."""
        try:
            with urllib.request.urlopen(f"{self.url}/admin/requests/{_id(number)}") as response:
                (found,) = msgspec.json.decode(response.read(), type=RequestTraces).traces
        except urllib.error.HTTPError:
            return None
        return found


def _id(number: int) -> str:
    return f"timeline-{number:05}."


def send_at_once(requests: Requests, numbers: range) -> float:
    """Send requests from several clients at once; return how many were answered per second."""
    began_at = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(requests.stream, numbers))
    return len(numbers) / (time.monotonic() - began_at)


@contextmanager
def kills(cluster: LocalCluster, counted: Counter[str]) -> Iterator[None]:
    """Kill workers in turn, each once it is ready and another one of its role is."""
    is_over = threading.Event()

    def kill() -> None:
        turn = 0
        names = ("prefill-0", "decode-0", "prefill-1", "decode-1")
        while not is_over.wait(KILL_PAUSE_SECONDS):
            if set(names) <= cluster.ready:
                cluster.send_signal(names[turn % len(names)], signal.SIGKILL)
                counted["workers killed"] += 1
                turn += 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run(name: str, model: Path, num_requests: int) -> Run:
    """Send the requests, and check their timelines."""
    arrangement, outcome, times = ARRANGEMENTS[name], Run(), {}
    with running(arrangement, model) as cluster:
        requests = Requests(cluster.url, model.name, arrangement.max_tokens)
        rate = send_at_once(requests, range(90_000, 90_000 + WARM_UP))
        numbers = range(num_requests)
        if arrangement.compares_clients:
            times = requests.stream_from_another_process(numbers, rate / 2)
        elif arrangement.kills:
            with kills(cluster, outcome.figures):
                send_at_once(requests, numbers)
        else:
            send_at_once(requests, numbers)
        loads = wait_until_quiet(cluster.url)
        for metric in ("tier_loaded_blocks_total", "peer_prefixes_total", "prefix_hit_tokens_total"):
            outcome.figures[metric.removesuffix("_total")] += int(sum(load.get(metric, 0) for load in loads.values()))
        traces = {number: trace for number in numbers if (trace := requests.trace(number)) is not None}
    for trace in traces.values():
        outcome.check(trace)
        outcome.check_order(trace)
    if len(traces) < num_requests:
        outcome.problems.append(f"only {len(traces)} of {num_requests} requests have a timeline")
    if arrangement.compares_clients:
        outcome.compare_clients(name, traces, times)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("arrangement", choices=list(ARRANGEMENTS))
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_demo_model(Path(folder) / "tiny-qwen3", architecture="qwen3")
        outcome = run(options.arrangement, model, options.requests)
    figures = {**outcome.figures, "beside stages": outcome.beside_stages}
    print(json.dumps(figures, indent=2))
    print("\n".join(outcome.problems[:20]), file=sys.stderr)
    if "SPLITSERVE_FIGURES" in os.environ:
        Path(os.environ["SPLITSERVE_FIGURES"]).write_text(json.dumps(figures))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
