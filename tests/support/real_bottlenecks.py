"""Bottlenecks planted in clusters of real processes, and healthy runs: what does the router's diagnosis name first?

    python tests/support/real_bottlenecks.py [CASE ...]

Each case starts a cluster, plants its bottleneck, sends load for ``LOAD_SECONDS`` and asks GET /admin/overview at its
end. Exit status 1 if a case named something else first. With SPLITSERVE_FIGURES set, the counts go to that file. A busy
machine plants bottlenecks of its own: run it on an idle one. Not a test module.
"""

import argparse
import asyncio
import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from serving import PATIENT
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.doctor.cluster import read_report
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.overview import read_overview
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, MemorySpec, ObjectivesSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.reports.overview import Overview
from waiting import wait_until

LOAD_SECONDS = float(os.environ.get("SPLITSERVE_LOAD_SECONDS", "40"))
HEALTHY_RUNS = 20
replace = msgspec.structs.replace
Plan = Callable[[random.Random], tuple[list[int], int]]


@dataclass(frozen=True)
class Load:
    """Closed-loop clients: each sends ``plan``'s prompt and number of output tokens, then thinks."""

    num_clients: int
    plan: Plan
    think_seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A planted bottleneck. ``beside`` runs beside the load, with the cluster's URL."""

    load: Load
    num_prefill: int = 1
    num_decode: int = 1
    change: Callable[[ClusterSpec], ClusterSpec] = lambda spec: spec
    beside: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _url: contextlib.nullcontext()
    engine: dict[str, Any] = field(default_factory=dict)


def fresh(low: int, high: int, num_output: int) -> Plan:
    """Return a plan of prompts that share nothing."""
    return lambda chosen: ([chosen.randrange(1, 250) for _ in range(chosen.randrange(low, high))], num_output)


async def run_load(url: str, load: Load, seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]

        async def client(number: int) -> None:
            chosen = random.Random(1000 * seed + number)
            await asyncio.sleep(chosen.random() * load.think_seconds)
            while time.monotonic() < end:
                prompt, num_output = load.plan(chosen)
                body = {"model": model, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "stream": True}
                async with session.post(f"{url}/v1/completions", json=body) as streamed:
                    async for _ in streamed.content:
                        pass
                await asyncio.sleep(load.think_seconds * chosen.uniform(0.5, 1.5))

        await asyncio.gather(*(client(number) for number in range(load.num_clients)))


# ---- plants ----


def small_decode(spec: ClusterSpec) -> ClusterSpec:
    pools = [replace(each, memory=MemorySpec(kv="2MiB")) if each.name == "decode" else each for each in spec.pools]
    return replace(spec, pools=pools)


def small_pools(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, pools=[replace(each, memory=MemorySpec(kv="3MiB")) for each in spec.pools])


def by_tcp(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, pools=[replace(each, environment={"UCX_TLS": "tcp"}) for each in spec.pools])


def strict(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, objectives=ObjectivesSpec(tpot_ms=2.0))


def repeating(chosen: random.Random) -> tuple[list[int], int]:
    """Return one of 40 prefixes of 500 tokens, which together fit no worker, and a new question."""
    prefix = random.Random(chosen.randrange(40))
    return [prefix.randrange(1, 250) for _ in range(500)] + [chosen.randrange(1, 250) for _ in range(20)], 4


def convoy(chosen: random.Random) -> tuple[list[int], int]:
    return fresh(3000, 3500, 2)(chosen) if chosen.random() < 0.12 else fresh(16, 32, 4)(chosen)


@contextlib.contextmanager
def throttled(url: str) -> Iterator[None]:
    """Stop one prefill worker for three quarters of the time."""
    workers = read_report(Endpoint(url)).workers
    pid = next(worker.info.pid for worker in workers if worker.info.party.engine_id == "prefill-1")
    ending = threading.Event()

    def throttle() -> None:
        while not ending.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.03)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@contextlib.contextmanager
def unread(url: str) -> Iterator[None]:
    """Ask for large answers and do not read them."""
    at = urlsplit(url)
    model = json.loads(Endpoint(url).get("/v1/models").body)["data"][0]["id"]
    opened = []
    for number in range(6):
        chosen = random.Random(number)
        prompts = [[chosen.randrange(1, 250) for _ in range(3500)] for _ in range(4)]
        body = json.dumps({"model": model, "prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20}).encode()
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((at.hostname, at.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        opened.append(made)
    try:
        wait_until(lambda: overview(url).router.num_unread >= 4, "answers that are not read fill no buffer")
        time.sleep(31.0)  # the window no longer has the prompts of these clients
        yield
    finally:
        for each in opened:
            each.close()


_FLOOD = """
import http.client, sys, threading
def send():
    connection = http.client.HTTPConnection(sys.argv[1])
    while True:
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
for _ in range(8):
    threading.Thread(target=send).start()
"""


@contextlib.contextmanager
def flood(url: str) -> Iterator[None]:
    """Send small requests that only the router answers, faster than it can."""
    command = [sys.executable, "-c", _FLOOD, urlsplit(url).netloc]
    senders = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(3)]
    try:
        yield
    finally:
        for sender in senders:
            sender.kill()
            sender.wait()


CASES: dict[str, Case] = {
    "prefill_short": Case(Load(24, fresh(1200, 1800, 2))),
    "decode_kv": Case(Load(24, fresh(100, 140, 200)), change=small_decode),
    "batch_too_big": Case(Load(32, fresh(8, 16, 150)), change=strict),
    "slow_transport": Case(Load(2, fresh(200, 400, 4), 0.3), change=by_tcp),
    "router_cpu": Case(Load(2, fresh(20, 60, 4), 0.2), beside=flood),
    "cold_prefix": Case(Load(3, repeating, 0.05), change=small_pools),
    "sick_worker": Case(Load(4, fresh(300, 500, 4), 0.1), num_prefill=2, beside=throttled),
    "long_prompts": Case(Load(8, convoy, 0.8)),
    "slow_clients": Case(Load(2, fresh(20, 60, 4), 0.3), beside=unread),
}
"""The cases that real processes on one machine can have; another NUMA node is left to tests/router/admin."""


# ---- runs ----


@contextlib.contextmanager
def cluster(case: Case, folder: Path) -> Iterator[str]:
    engine = EngineConfig(model=str(folder), dtype="float32", kv_memory_bytes=64 << 20, threads=1, **case.engine)
    spec = simple_spec(engine, num_prefill=case.num_prefill, num_decode=case.num_decode, port=0, protocol=PATIENT)
    with LocalCluster(case.change(spec), log_level="error") as running:
        yield running.url


def overview(url: str) -> Overview:
    return read_overview(Endpoint(url))


def planted(name: str, folder: Path) -> bool:
    """Run a case; return whether its bottleneck was named first."""
    case = CASES[name]
    with cluster(case, folder) as url, case.beside(url):
        asyncio.run(run_load(url, case.load, LOAD_SECONDS, 1))
        view = overview(url)
    found = view.diagnosis
    shown = ", ".join(f"{each.name} {each.severity:.2f}" for each in found.findings)
    is_first = bool(found.findings) and found.findings[0].name == name
    print(f"{'named' if is_first else 'MISSED'} {name}: {shown or found.state}; {found.sentence}", flush=True)
    if not is_first:
        print(f"  {figures_of(view)}", flush=True)
    return is_first


def figures_of(view: Overview) -> str:
    """Return what a diagnosis rests on, in a line."""
    stages = ", ".join(f"{stage.name} {1e3 * stage.times.mean:.0f} ms" for stage in view.stages)
    workers = ", ".join(
        f"{each.engine_id} busy {each.busy_share:.2f} used {each.blocks_used} reserved {each.blocks_reserved} of "
        f"{each.blocks}, slowness {each.slowness:.1f}"
        for each in view.workers
    )
    return f"{view.ttft.num} first tokens: {stages}; {workers}; {view.router}"


def healthy(folder: Path) -> int:
    """Run moderate loads on one cluster; return the number of runs with an alarm."""
    num_alarms = 0
    with cluster(Case(Load(1, fresh(8, 9, 1)), num_prefill=2), folder) as url:
        for number in range(HEALTHY_RUNS):
            chosen = random.Random(number)
            low = chosen.randrange(20, 200)
            load = Load(
                chosen.randrange(1, 5), fresh(low, low + 200, chosen.randrange(4, 40)), chosen.uniform(0.3, 1.0)
            )
            asyncio.run(run_load(url, load, LOAD_SECONDS / 2, number))
            found = overview(url).diagnosis
            num_alarms += found.state == "limited"
            if found.state == "limited":
                print(f"  {figures_of(overview(url))}", flush=True)
            print(f"healthy run {number}: {found.state}; {found.sentence}", flush=True)
    return num_alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}, healthy; none: all")
    names = parser.parse_args().cases or [*CASES, "healthy"]
    if unknown := sorted(set(names) - {*CASES, "healthy"}):
        parser.error(f"unknown cases: {', '.join(unknown)}")
    figures: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="splitserve-bottlenecks-") as scratch:
        folder = write_demo_model(Path(scratch) / "demo")
        chosen = [name for name in names if name != "healthy"]
        if chosen:
            named = sum(planted(name, folder) for name in chosen)
            figures |= {"planted": len(chosen), "named_first": named}
        if "healthy" in names:
            figures |= {"healthy_runs": HEALTHY_RUNS, "false_alarms": healthy(folder)}
    print(", ".join(f"{name}: {value}" for name, value in figures.items()))
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps(figures))
    return int(figures.get("named_first", 0) < figures.get("planted", 0) or figures.get("false_alarms", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
