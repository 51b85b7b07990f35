"""Clusters on several machines: time to answer, the same tokens as on one machine, and a sequence of events under load
that loses no request: Ray dies on one machine, another one loses its network, one joins, a pool is scaled, all workers
are upgraded one by one, everything is removed.

The machines are network namespaces of this one (see :mod:`.ray_machines`); KV crosses between them over TCP.
"""

import argparse
import asyncio
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from splitserve.benchmarks.chaos.load import Answer, Case, Streams, ask_all, make_cases
from splitserve.benchmarks.cluster.ray_machines import Machine, Machines
from splitserve.benchmarks.cluster.recovery_times import Recovery, lost_and_back, recoveries
from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, kept_options, table
from splitserve.common.errors import SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.common.processes import processes_with
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.ray.head import NODE_SETTINGS
from splitserve.orchestration.ray.health import RECOMMENDED
from splitserve.orchestration.ray.names import CLUSTER_VARIABLE
from splitserve.orchestration.spec.document import parse_spec

NAME = "bench"
SETTLE_SECONDS = 180.0
POLL_SECONDS = 6.0  # each status request is a command that joins Ray, and takes a core for a while
ORPHAN_SECONDS = 120.0  # for Ray to end its processes on a machine that it has declared dead

SPEC = """
name: bench
model: {{path: {model}, served_name: tiny, max_model_len: 1200}}
pools:
- {{name: fill, role: prefill, count: {pairs}, threads: 1, dtype: float32, memory: {{kv: 24MiB}}}}
- {{name: gen, role: decode, count: {pairs}, threads: 1, dtype: float32, memory: {{kv: 48MiB}}}}
engine: {{max_num_batched_tokens: 128, max_num_seqs: 32}}
router: {{host: {host}, port: 0, policy: least-loaded}}
"""


@dataclass
class Life:
    """Record of the whole run."""

    seconds: dict[str, float] = field(default_factory=dict)  # by step
    recovered: dict[str, list[Recovery]] = field(default_factory=dict)  # by death, the workers that it took
    num_requests: int = 0
    num_moved: int = 0
    problems: list[str] = field(default_factory=list)  # requests without their tokens, and leftovers

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        print(f"{name} ...", flush=True)
        yield
        self.seconds[name] = time.monotonic() - began
        print(f"{name}: {self.seconds[name]:.1f} s", flush=True)


class Load:
    """Streams on a thread of their own, from :meth:`start` to :meth:`finish`."""

    def __init__(self, url: str, cases: Sequence[Case], expected: dict[str, Answer], count: int, life: Life) -> None:
        self._arguments = (url, cases, count)
        self._expected = expected
        self._life = life
        self._finish = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._finish.set()
        self._thread.join(SETTLE_SECONDS)
        if self._thread.is_alive():
            self._life.problems.append("a request didn't end")

    async def _run(self) -> None:
        url, cases, count = self._arguments
        streams = Streams(url, cases, count, 0, self._take)
        while not self._finish.is_set():
            await asyncio.sleep(0.1)
        await streams.finish()

    def _take(self, answer: Answer) -> None:
        self._life.num_requests += 1
        self._life.num_moved += bool(answer.failed_attempts)
        difference = answer.difference(self._expected[answer.case])
        if difference:
            self._life.problems.append(f"{answer.case}: {difference}")


def same_everywhere(one: Sequence[Answer], other: Sequence[Answer]) -> list[str]:
    """Describe cases that two clusters answer differently."""
    pairs = ((a, a.difference(b)) for a, b in zip(one, other, strict=True))
    return [f"{answer.case}: {difference}" for answer, difference in pairs if difference]


def local_answers(model: str, options: argparse.Namespace, cases: Sequence[Case], life: Life) -> list[Answer]:
    """Answer the cases with the same spec on this machine."""
    spec = parse_spec(SPEC.format(model=model, pairs=options.pairs, host="127.0.0.1"))
    cluster = LocalCluster(spec, log_level="error")
    try:
        with life.step("local cluster, from nothing to answering"):
            cluster.start()
        with cluster.supervised():
            return asyncio.run(ask_all(cluster.url, cases, 1))
    finally:
        cluster.stop()


class Control:
    """Commands of ``splitserve`` on one of the machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def __call__(self, *arguments: str) -> str:
        return self._machines.run(self._machines.machines[0], arguments)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self("status", "--json", "--name", NAME))
        return status

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise SplitserveError(f"the cluster didn't settle: {status}")
            time.sleep(POLL_SECONDS)
        return status


def is_whole(status: dict[str, Any]) -> bool:
    return all(worker["phase"] == "ready" for worker in status["workers"])


def live(machines: Machines, options: argparse.Namespace, model: str, cases: list[Case], life: Life) -> None:
    control = Control(machines)
    secret = machines.folder / "secret"
    secret.write_text(secrets.token_hex(32))
    text = SPEC.format(model=model, pairs=options.pairs, host="0.0.0.0")
    text += f"secrets: {{shared: {{file: {secret}}}}}\nconnector: {{transports: [tcp]}}\n"
    spec = machines.folder / "spec.yaml"
    spec.write_text(text)
    with life.step(f"Ray on {options.nodes} machines"):
        for _ in range(options.nodes):
            machines.add()
    with life.step("cluster on Ray, from nothing to answering"):
        output = control("up", "--ray", machines.ray_address, "--spec", str(spec))
    url = output.split("Ready: ")[1].split("/v1")[0]
    locations = [worker["runs_on"] for worker in control.status()["workers"]]
    print(table([[name, locations.count(name)] for name in sorted(set(locations))], ["machine", "workers"]))
    answers = asyncio.run(ask_all(url, cases, 1))
    expected = {answer.case: answer for answer in local_answers(model, options, cases, life)}
    life.problems += same_everywhere(answers, list(expected.values()))

    load = Load(url, cases, expected, options.streams, life)
    load.start()
    time.sleep(3.0)
    lose_machine(machines, control, "raylet killed", machines.kill_raylet, life)
    lose_machine(machines, control, "network cut", machines.cut_off, life)
    if not options.short:
        grow(machines, control, options.pairs, life)
    load.finish()
    with life.step("down"):
        control("down", "--name", NAME)
    life.problems += [f"pid {pid} was left over" for pid in leftover_pids()]


def lose_machine(machines: Machines, control: Control, death: str, kill: Callable[[Machine], None], life: Life) -> None:
    """Wait until the machine's workers are ready elsewhere, and none of the cluster's processes runs on it once it is
    reachable."""
    victim = machines.machines[-1]
    names = {worker["name"] for worker in control.status()["workers"] if worker["runs_on"] == victim.address}
    died_at = time.time()
    with life.step(f"{death}: all its workers are back elsewhere, and it was seen"):
        kill(victim)
        status = control.wait_until(lambda status: lost_and_back(status, names, died_at) and is_whole(status))
    life.recovered[death] = recoveries(status, names, died_at)
    if any(worker["runs_on"] == victim.address for worker in status["workers"]):
        life.problems.append(f"{death}: a worker is still said to run on {victim.address}")
    machines.reconnect(victim)
    with life.step(f"{death}: the machine has ended what it ran"):
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := leftover_pids() & machines.pids_in(victim):
            if time.monotonic() > deadline:
                life.problems.append(f"{death}: {len(left)} processes of the cluster still run on the lost machine")
                break
            time.sleep(0.1)
    machines.kill(victim)


def grow(machines: Machines, control: Control, pairs: int, life: Life) -> None:
    with life.step("another machine joins"):
        newcomer = machines.add()
    with life.step("a pool is scaled"):
        control("scale", "gen", str(pairs + 1), "--name", NAME)
    check_newcomer(control.status(), newcomer, life)
    with life.step("all workers are upgraded"):
        control("upgrade", "--name", NAME)


def check_newcomer(status: dict[str, Any], newcomer: Machine, life: Life) -> None:
    if newcomer.address not in {worker["runs_on"] for worker in status["workers"]}:
        life.problems.append(f"the machine that joined ({newcomer.address}) got no worker")


def leftover_pids() -> set[int]:
    """Return the processes of the cluster that still run."""
    return {process.pid for process in processes_with(CLUSTER_VARIABLE, NAME)}


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="splitserve bench cluster", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--nodes", type=positive, default=4, help="machines, the first of which is Ray's head")
    parser.add_argument("--pairs", type=positive, default=2, help="prefill workers, and as many decode workers")
    parser.add_argument("--cpus", type=positive, default=6, help="processors of each machine as counted by Ray")
    parser.add_argument("--streams", type=positive, default=3, help="requests in flight at any time")
    parser.add_argument("--cases", type=positive, default=12, help="different requests")
    parser.add_argument("--short", action="store_true", help="run only the start and the deaths")
    parser.add_argument("--ray-defaults", action="store_true", help="use none of the settings of docs/guides/ray.md")
    add_result_options(parser)
    return parser


def recovery_table(recovered: dict[str, list[Recovery]]) -> str:
    rows = [
        [
            death,
            each.worker,
            *(f"{s:.1f}" for s in (each.detection, each.delay, each.assignment, each.start, each.total)),
        ]
        for death, workers in recovered.items()
        for each in workers
    ]
    return table(rows, ["death", "worker", "detection s", "delay s", "node assignment s", "start s", "total s"])


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    set_up_logging("bench", "warning")
    life = Life()
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as directory:
        model = str(write_demo_model(Path(directory) / "model"))
        cases = make_cases("tiny", options.cases, 0)
        settings = {} if options.ray_defaults else NODE_SETTINGS | RECOMMENDED
        environment = {"SPLITSERVE_STATE_DIR": f"{directory}/state", **settings}
        with Machines(options.cpus, environment) as machines:
            live(machines, options, model, cases, life)
    print(table([[name, f"{seconds:.1f}"] for name, seconds in life.seconds.items()], ["step", "s"]))
    print(recovery_table(life.recovered))
    print(f"{life.num_requests} requests, {life.num_moved} of them continued by another worker")
    for problem in life.problems:
        print(f"FAIL {problem}")
    data = {"options": kept_options(options), "ray_settings": settings, "load_average": os.getloadavg(), **asdict(life)}
    keep_result("cluster", argv, data, options)
    return 1 if life.problems else 0
