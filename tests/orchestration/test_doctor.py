"""`splitserve doctor` as a user runs it: nothing on a healthy system, each of ten planted misconfigurations by name.

The misconfigurations are real: workers, sockets, limits and files, around one running cluster.
"""

import functools
import io
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from misconfigured_worker import FAULT, SECONDS_AHEAD
from splitserve.common.cores import available_cores
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cli.main import main
from splitserve.orchestration.cluster.host import ChildExited, Event
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.doctor import machine
from splitserve.orchestration.doctor.cluster import read_report
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import ClusterReport
from splitserve.protocol.config import EngineConfig, ProtocolConfig, WorkerConfig
from splitserve.protocol.request import Role
from waiting import PATIENCE_SECONDS, wait_until

SECRET, API_KEY = "of-this-cluster-" * 2, "key-of-the-endpoint"
PROTOCOL = ProtocolConfig(heartbeat_seconds=0.3, dead_after_seconds=6.0)
SUPPORT = Path(__file__).parents[1] / "support"
CROWD = set() if available_cores() > 2 else {"oversubscribed_cores"}
"""What else is wrong where a third worker has no core of its own."""


@dataclass
class Running:
    url: str
    engine: EngineConfig
    membership: str

    def report(self) -> ClusterReport:
        return read_report(Endpoint(self.url, API_KEY))


@pytest.fixture(scope="module")
def running(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """1P1D with a shared secret and an API key, in an environment of its own."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPLITSERVE_SECRET", SECRET)
        environment.setenv("SPLITSERVE_API_KEY", API_KEY)
        environment.setenv("SPLITSERVE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        environment.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        engine = EngineConfig(model=str(tiny_qwen3), threads=1, kv_memory_bytes=16 << 20, device="cpu")
        with LocalCluster(simple_spec(engine, num_prefill=1, num_decode=1, port=0, protocol=PROTOCOL)) as cluster:
            membership = read_report(Endpoint(cluster.url, API_KEY)).membership
            yield Running(cluster.url, engine, membership)


@pytest.fixture(scope="module", autouse=True)
def torch_asked_once() -> Iterator[None]:
    """Facts that a process of its own reads from PyTorch, read once for all commands that run in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "ask_torch", functools.cache(machine.ask_torch))
        yield


def started(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command in a process of its own."""
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, f"{arguments}: {done.returncode}\n{done.stderr}"
    return done.returncode, json.loads(done.stdout)


def run_here(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of the command in this process, which has imported what it needs already."""
    output, errors, on_end = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as variables, redirect_stdout(output), redirect_stderr(errors):
        for name, value in (environment or {}).items():
            variables.setenv(name, value)
        try:
            status = main(["doctor", *arguments])
        finally:
            signal.signal(signal.SIGTERM, on_end)
    return status, output.getvalue(), errors.getvalue()


def doctor(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command in this process."""
    status, output, errors = run_here("--json", *arguments, environment=environment)
    assert output, f"{arguments}: {status}\n{errors}"
    return status, json.loads(output)


class Names(set[str]):
    """Names of problems, with their texts for assertions that fail."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(found["problems"])
        self._words = [problem for check in found["checks"] for problem in check["problems"]]

    def __sub__(self, others: AbstractSet[Any]) -> "Names":
        self.difference_update(others)
        return self

    def __repr__(self) -> str:
        return f"{sorted(self)}: {self._words}"


def names(status: int, found: dict[str, Any]) -> Names:
    """Return the names of the problems, after a check of exit status and advice."""
    assert status == (1 if found["problems"] else 0) and found["healthy"] == (not found["problems"])
    assert all(problem["advice"] for check in found["checks"] for problem in check["problems"])
    return Names(found)


def text_of(found: dict[str, Any], name: str) -> str:
    return "\n".join(
        problem["text"] for check in found["checks"] for problem in check["problems"] if problem["name"] == name
    )


@contextmanager
def another_worker(
    running: Running,
    *,
    fault: str = "",
    secret: str = SECRET,
    environment: Mapping[str, str] | None = None,
    threads: int = 1,
    **engine: Any,
) -> Iterator[ChildProcess]:
    """A prefill worker of the running cluster, until the end of the block; then it is gone from the report, too."""
    config = WorkerConfig(
        engine_id="prefill-x",
        role=Role.PREFILL,
        engine=msgspec.structs.replace(running.engine, threads=threads, **engine),
        membership=running.membership,
        protocol=PROTOCOL,
        secret=secret,
    )
    events: queue.Queue[Event] = queue.Queue()
    child = ChildProcess(
        name="prefill-x",
        entry="misconfigured_worker:run_worker",
        config=config,
        threads=threads,
        log_level="error",
        emit=events.put,
        environment={**(environment or {}), **({FAULT: fault} if fault else {})},
        preloaded="splitserve.worker.entry",
    )
    try:
        yield child
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            with suppress(ProcessLookupError):  # a worker that was refused has ended
                os.kill(child.pid, number)
        wait_until(lambda: any(isinstance(event, ChildExited) for event in list(events.queue)), "it doesn't end")
        assert child.join(PATIENCE_SECONDS)
        wait_until(lambda: not is_registered(running, "prefill-x"), "it stays in the report")


def is_registered(running: Running, name: str) -> bool:
    return any(worker.info.party.engine_id == name for worker in running.report().workers)


def is_ready(running: Running, name: str) -> bool:
    return any(
        worker.info.party.engine_id == name and worker.state == "ready" and worker.num_heartbeats
        for worker in running.report().workers
    )


def test_a_healthy_cluster(running: Running) -> None:
    status, found = started("--against", running.url)
    assert names(status, found) - CROWD == set(), found["checks"]
    probe = found["probe"]
    assert (probe["prefill"], probe["decode"]) == ("prefill-0", "decode-0")
    assert probe["transport"].startswith("nixl/") and probe["blocks"] == 33 and probe["prompt_tokens"] == 520
    assert probe["bytes"] > 0 and probe["bytes_per_second"] > 0 and probe["copy_bytes_per_second"] > 0
    assert 0 < probe["handover_seconds"] < 60
    assert probe["prefix"] == {"predicted_tokens": 512, "found_tokens": 512}


def test_this_machine_and_what_it_prints(running: Running, tiny_qwen3: Path) -> None:
    """A cluster of its own for the probe. The fixture is here for its environment."""
    status, output, errors = run_here(str(tiny_qwen3), "--port", "0")
    assert status == 0, output + errors
    assert "Nothing is wrong with this machine." in output
    assert re.search(r"^ok +hand-over +33 blocks, .* by nixl/\w+ in", output, re.MULTILINE)
    assert re.search(r"^ok +model files .*tensors in 1 file$", output, re.MULTILINE)
    assert {line.split()[0] for line in output.splitlines() if line[:1].isalpha()} <= {
        "splitserve",
        "ok",
        "skipped",
        "Nothing",
    }


# ---- planted around the running cluster ----


def test_wrong_transport(running: Running) -> None:
    with another_worker(running, environment={"UCX_TLS": "tcp"}):
        wait_until(lambda: is_ready(running, "prefill-x"), "it doesn't get ready")
        status, found = doctor("--against", running.url, "--no-probe")
        assert names(status, found) - CROWD == {"wrong_transport", "slow_transport"}
        assert "decode-0 reads KV from prefill-x by tcp" in text_of(found, "wrong_transport")
        (check,) = (check for check in found["checks"] if check["name"] == "transport")
        assert "prefill-x has UCX_TLS=tcp" in check["problems"][0]["advice"]


def test_low_memlock_clock_off_and_oversubscribed_cores(running: Running) -> None:
    """Each is told, whatever else is wrong."""
    with another_worker(running, fault="low_memlock clock_off", threads=available_cores() + 1):
        wait_until(lambda: is_ready(running, "prefill-x"), "it doesn't get ready")
        status, found = doctor("--against", running.url, "--no-probe")
    assert names(status, found) == {"low_memlock", "clock_offset", "oversubscribed_cores"}
    assert "prefill-x may lock 64.0 KiB" in text_of(found, "low_memlock")
    seconds = re.search(r"clock of prefill-x is (\S+) s ahead of", text_of(found, "clock_offset"))
    assert seconds is not None and float(seconds[1]) == pytest.approx(SECONDS_AHEAD, abs=30.0)
    total = available_cores() + 3
    assert f"{total} threads on {available_cores()} cores" in text_of(found, "oversubscribed_cores")


def test_unreachable_peer(running: Running) -> None:
    with another_worker(running, fault="unreachable"):
        wait_until(lambda: is_registered(running, "prefill-x"), "it doesn't register")
        status, found = doctor("--against", running.url, "--no-probe")
    assert names(status, found) - CROWD == {"unreachable_peer"}
    assert "can't connect to prefill-x at tcp://127.0.0.1:" in text_of(found, "unreachable_peer")


def test_stale_worker(running: Running) -> None:
    with another_worker(running) as worker:
        wait_until(lambda: is_ready(running, "prefill-x"), "it doesn't get ready")
        os.kill(worker.pid, signal.SIGSTOP)
        status, found = doctor("--against", running.url, "--no-probe")
    assert names(status, found) == {"stale_worker"}
    assert "prefill-x is registered, but has sent nothing for" in text_of(found, "stale_worker")


def test_secret_mismatch(running: Running) -> None:
    with another_worker(running, secret="of-another-cluster-" * 2):
        # A busy router may look up an address after ZMQ has closed the connection; the worker dials again and again.
        wait_until(lambda: any(each.address == "127.0.0.1" for each in running.report().strangers), "it doesn't dial")
        status, found = doctor("--against", running.url, "--no-probe")
    assert names(status, found) == {"secret_mismatch"}
    assert "connections from 127.0.0.1" in text_of(found, "secret_mismatch")


def test_different_layout(running: Running) -> None:
    with another_worker(running, block_size=32):
        wait_until(lambda: bool(running.report().refused), "it isn't refused")
        status, found = doctor("--against", running.url, "--no-probe")
    before = {"secret_mismatch"}  # the worker of the last test is remembered for a while
    assert names(status, found) - before == {"layout_mismatch"}
    assert re.search(r"prefill-x .* was refused .* block_size: 32 against 16", text_of(found, "layout_mismatch"))


# ---- planted on this machine, before a start ----


def test_port_taken(running: Running, tiny_qwen3: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, found = doctor(str(tiny_qwen3), "--port", str(port), "--no-probe")
    assert names(status, found) == {"port_taken"}
    assert f"port {port} of 127.0.0.1 is taken" in text_of(found, "port_taken")
    assert f"pid {os.getpid()}" in text_of(found, "port_taken")


def test_missing_weights(running: Running, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model", max_shard_bytes=2_000_000)
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    status, found = doctor(str(model), "--port", "0", "--no-probe")
    assert names(status, found) == {"missing_weights"}
    assert f"{shards[1].name} is named by the index but missing" in text_of(found, "missing_weights")


def test_low_memlock_of_this_shell(running: Running) -> None:
    """Processes that are started from here would have the same limit."""
    limited = (
        f"ulimit -S -l 64 && exec {sys.executable}"
        " -m splitserve.orchestration.cli.main doctor --json --no-probe --port 0"
    )
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=200, check=False)
    assert names(done.returncode, json.loads(done.stdout)) == {"low_memlock"}


def test_wrong_transport_of_this_shell(running: Running) -> None:
    """The processes of the probe have it from here."""
    status, found = doctor("--port", "0", environment={"UCX_TLS": "tcp"})
    assert names(status, found) == {"wrong_transport"}
    assert found["probe"]["transport"].startswith("nixl/tcp") and found["probe"]["blocks"] == 33


def test_a_secret_that_is_set_here(running: Running) -> None:
    wrong = {"SPLITSERVE_SECRET": "of-another-cluster-" * 2}
    status, found = doctor("--against", running.url, "--no-probe", environment=wrong)
    assert "secret_mismatch" in names(status, found)
    assert "the secret that is set here doesn't open tcp://" in text_of(found, "secret_mismatch")


def test_a_transport_can_be_asked_for(running: Running) -> None:
    status, found = doctor("--against", running.url, "--no-probe", "--transport", "tcp")
    assert "wrong_transport" in names(status, found)


# ---- where it can't look ----


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--against", "{url}"], "another-key", "requires another API key"),
        (["--against", "ftp://host"], API_KEY, "is no URL of an endpoint"),
        (["--against", "{url}", "some/model"], API_KEY, "remove MODEL and --spec"),
        (["--transport", "tcp", "--no-probe"], API_KEY, "remove --transport or --no-probe"),
    ],
)
def test_what_it_refuses(running: Running, arguments: list[str], key: str, message: str) -> None:
    filled = [argument.format(url=running.url) for argument in arguments]
    status, output, errors = run_here(*filled, environment={"SPLITSERVE_API_KEY": key})
    assert status == 2 and message in errors, output + errors


def test_nobody_there(running: Running) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    status, found = doctor("--against", url)
    assert names(status, found) == {"no_endpoint"}
    assert found["probe"] is None


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (
            ["-tp", "3", "--host-kv-memory", "900TB"],
            ["8 attention heads", "--host-kv-memory: takes most of"],
        ),
        (["--kv-memory", "900TB"], ["this machine has"]),
    ],
)
def test_a_model_or_memory_that_does_not_fit(
    running: Running, tiny_qwen3: Path, options: list[str], messages: list[str]
) -> None:
    status, found = doctor(str(tiny_qwen3), "--mixed", "1", "--port", "0", "--no-probe", *options)
    assert "spec" in names(status, found)
    assert not [message for message in messages if message not in text_of(found, "spec")]


def test_a_plan_that_cannot_be_started(running: Running, tiny_qwen3: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"""
model: {{path: {tiny_qwen3}}}
pools:
- {{name: p, role: prefill, count: {available_cores() + 1}}}
- {{name: d, role: decode}}
router: {{port: 0}}
secrets: {{shared: {{env: NOT_SET_HERE}}}}
""")
    status, found = doctor("--spec", str(spec))
    assert names(status, found) == {"spec", "oversubscribed_cores"}
    assert "NOT_SET_HERE isn't set here" in text_of(found, "spec") and found["probe"] is None
