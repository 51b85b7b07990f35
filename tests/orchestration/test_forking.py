"""Workers of a fork server: as if started each by itself, and gone with their server or their launcher."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from running import is_running
from splitserve.orchestration.cluster import children
from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.hosts import forking, process
from splitserve.orchestration.hosts.forking import LOST_STATUS, ForkError
from splitserve.orchestration.hosts.process import ChildProcess, child_environment
from splitserve.orchestration.hosts.shared_memory import SHARED_MEMORY
from splitserve.protocol.config import EngineConfig, WorkerConfig
from waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.skipif(not forking.can_fork(), reason="needs descriptors of processes")
SUPPORT = Path(__file__).parents[1] / "support"
ENVIRONMENT = {"PYTHONPATH": str(SUPPORT)}
LAUNCHER = """
import sys
from test_forking import Worker
worker = Worker("w-0")
worker.wait_for("ready")
print(worker.child.pid, worker.server().pid, flush=True)
sys.stdin.read()
"""

FORKING_LAUNCHER = """
import os, signal, sys
from test_forking import Worker
worker = Worker("w-0", preloaded="json")
worker.wait_for("ready")
if os.fork() == 0:
    sys.exit(0)
os.wait()
worker.child.send_signal(signal.SIGTERM)
print(worker.wait_for_exit())
"""


class Worker:
    """Child of a fork server, and its events."""

    def __init__(
        self,
        name: str,
        behaviour: str = "",
        *,
        preloaded: str = "splitserve.worker.entry",
        log_file: Path | None = None,
        **variables: str,
    ) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        engine = EngineConfig(model="m")
        self.child = ChildProcess(
            name=name,
            entry="launcher_children:run_worker",
            config=WorkerConfig(
                engine_id=name, role="mixed", membership="tcp://127.0.0.1:9", engine=engine, secret="s3cret"
            ),
            threads=3,
            log_level="info",
            emit=self.events.put,
            environment={**ENVIRONMENT, "SPLITSERVE_TEST_BEHAVIOUR": f"{name}={behaviour}", **variables},
            preloaded=preloaded,
            log_file=log_file,
        )

    def wait_for(self, stage: str) -> dict[str, str]:
        while True:
            event = self.events.get(timeout=PATIENCE_SECONDS)
            assert isinstance(event, ChildProgress), event
            if event.stage == stage:
                return event.detail

    def wait_for_exit(self) -> int:
        while not isinstance(event := self.events.get(timeout=PATIENCE_SECONDS), ChildExited):
            pass
        assert self.child.join(PATIENCE_SECONDS) and not self.child.is_alive()
        return event.returncode

    def server(self) -> psutil.Process:
        parent = psutil.Process(self.child.pid).parent()
        assert parent is not None
        return parent


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start_one(name: str, behaviour: str = "", **options: Any) -> Worker:
        workers.append(Worker(name, behaviour, **options))
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.child.kill()
        assert worker.child.join(PATIENCE_SECONDS)


def imports_after(path: Path) -> dict[str, str]:
    """Return options of a worker whose fork server, which is no other worker's, has imported once ``path`` exists."""
    return {"preloaded": "late_import", "SPLITSERVE_TEST_IMPORT_AFTER": str(path), "PATH_OF_THE_TEST": str(path)}


def shared_memory_of(name: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"splitserve-{os.getpid()}-{name}-*"))


def test_workers_of_one_server_have_their_own_surroundings(
    start: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("w-0", FIRST_NUM_THREADS="1")
    monkeypatch.chdir(tmp_path)
    other = start("w-1", OMP_NUM_THREADS="2", UCX_TLS="tcp")
    assert json.loads(one.wait_for("environment")["variables"]).items() >= {
        ("FIRST_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "3"), ("OPENBLAS_NUM_THREADS", "3"),
    }  # fmt: skip
    assert "FIRST_NUM_THREADS" not in json.loads(other.wait_for("environment")["variables"])
    assert one.server() == other.server() and one.server().ppid() == os.getpid()
    pids = [one.child.pid, other.child.pid]
    assert [os.getpgid(pid) for pid in pids] == pids and {os.getsid(pid) for pid in pids} == {os.getsid(0)}
    assert psutil.Process(other.child.pid).cwd() == str(tmp_path) != psutil.Process(one.child.pid).cwd()
    for number in (signal.SIGTERM, signal.SIGINT):
        worker = (one, other)[number == signal.SIGINT]
        worker.wait_for("ready")
        worker.child.send_signal(number)
        assert worker.wait_for_exit() == 0
        worker.child.send_signal(number)  # to no other process


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.01, 0.05])
def test_an_interrupt_during_the_start_leaves_no_words(
    start: Callable[..., Worker], tmp_path: Path, seconds: float
) -> None:
    """However early it comes: it is for an end in order, of which there is nothing yet."""
    start("first").wait_for("ready")  # the server has imported everything
    worker = start("w-0", log_file=tmp_path / "log")
    time.sleep(seconds)
    worker.child.send_signal(signal.SIGINT)
    assert worker.wait_for_exit() in (0, -signal.SIGINT)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and "KeyboardInterrupt" not in log, log


@pytest.mark.parametrize(
    ("behaviour", "returncode", "message"),
    [
        ("refuse", 2, "model.norm.weight is missing: take a complete checkpoint"),
        ("bug", 1, "ZeroDivisionError: nobody foresaw this"),
        ("crash", -signal.SIGKILL, "was ended by SIGKILL"),
        ("half-a-line", -signal.SIGKILL, "was ended by SIGKILL"),
    ],
)
def test_ends_are_reported(start: Callable[..., Worker], behaviour: str, returncode: int, message: str) -> None:
    worker = start("w-0", behaviour)
    assert worker.wait_for_exit() == returncode
    assert worker.child.describe_exit(returncode) == message


def test_a_launcher_does_not_wait_for_its_fork_server(start: Callable[..., Worker], tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    worker = start("w-0", **imports_after(imported))
    assert worker.child.pid == 0 and worker.child.is_alive() and not worker.child.join(0.0)
    imported.touch()
    assert int(worker.wait_for("started")["pid"]) == worker.child.pid
    worker.wait_for("ready")
    worker.child.send_signal(signal.SIGTERM)
    assert worker.wait_for_exit() == 0


def test_a_child_that_cannot_be_started_has_ended(start: Callable[..., Worker], tmp_path: Path) -> None:
    worker = start("w-0", log_file=tmp_path / "none" / "log")
    assert worker.wait_for_exit() == 1
    assert worker.child.describe_exit(1).startswith("can't be started: FileNotFoundError: [Errno 2] No such file")


def test_a_child_whose_start_fails_in_another_way_has_ended(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process, "fork_child", fail)
    worker = start("w-0")
    assert worker.wait_for_exit() == 1
    assert worker.child.describe_exit(1) == "can't be started: RuntimeError: can't start new thread"
    assert not shared_memory_of("w-0")


def test_a_child_that_cannot_be_followed_ends_before_its_exit_is_reported(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no thread for the log")

    monkeypatch.setattr(process, "keep_short", fail)
    worker = start("w-0", log_file=tmp_path / "log")
    returncode = worker.wait_for_exit()
    assert returncode == -signal.SIGKILL
    assert worker.child.describe_exit(returncode) == (
        "was ended by its launcher, which could not follow it: OSError: no thread for the log"
    )
    assert not psutil.pid_exists(worker.child.pid) and not shared_memory_of("w-0")


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_signals_do_not_wait_for_the_start(start: Callable[..., Worker], tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    worker = start("w-0", **imports_after(imported))
    worker.child.kill()
    assert worker.child.pid == 0 and worker.child.is_alive()
    imported.touch()
    assert worker.wait_for_exit() == -signal.SIGKILL


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_the_end_of_a_cluster_does_not_wait_for_a_fork_server_that_hangs(
    start: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STOP_GRACE_SECONDS", "KILLED_SECONDS"):
        monkeypatch.setattr(children, name, 0.05)
    imported = tmp_path / "imported"
    worker = start("w-0", **imports_after(imported))
    cluster = Children(lambda: False)
    cluster.add(worker.child)
    cluster.end_all(0.0)
    assert worker.child.pid == 0
    imported.touch()
    assert worker.wait_for_exit() != 0


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_server_that_hangs_in_its_imports_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "CLOSE_SECONDS", 0.05)
    variables = {"PYTHONPATH": str(SUPPORT), "SPLITSERVE_TEST_IMPORT_AFTER": str(tmp_path / "never")}
    server = forking.ForkServerLink({**os.environ, **variables}, "late_import")
    server.close()
    assert not server.is_running()


def test_no_descriptor_of_one_worker_is_in_another(start: Callable[..., Worker]) -> None:
    """The end of a status pipe must mean the end of its process."""
    workers = [start("w-0"), start("w-1")]
    pipes = []
    for worker in workers:
        worker.wait_for("ready")
        folder = Path(f"/proc/{worker.child.pid}/fd")
        links = [os.readlink(entry) for entry in folder.iterdir() if int(entry.name) > 2 or entry.name == "0"]
        pipes.append({link for link in links if link.startswith(("pipe:", "socket:"))})
        assert len(pipes[-1]) == 2, links
    assert not pipes[0] & pipes[1]


def test_workers_end_with_their_server_and_the_next_has_another(start: Callable[..., Worker]) -> None:
    worker = start("w-0")
    worker.wait_for("ready")
    server = worker.server()
    server.kill()
    assert worker.wait_for_exit() == LOST_STATUS
    successor = start("w-0")
    successor.wait_for("ready")
    assert successor.server() != server and not is_running(server)


def test_server_and_workers_end_with_the_launcher() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(Path(__file__).parent)])},
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(processes) == 2
        launcher.kill()
    wait_until(lambda: not any(is_running(one) for one in processes), lambda: str(processes))


def test_the_end_of_a_process_forked_from_the_launcher_leaves_its_workers() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(Path(__file__).parent)])}
    command = [sys.executable, "-c", FORKING_LAUNCHER]
    launcher = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert launcher.stdout == "0\n"


def test_variables_that_libraries_read_while_they_are_loaded() -> None:
    """Without a start: the environments that may share a server."""
    base = child_environment(1, {"PATH": "/bin", "UCX_TLS": "tcp", "CUDA_VISIBLE_DEVICES": "0"})
    key = forking.key_of(base)
    assert key == forking.key_of({**base, "UCX_TLS": "sm", "OMP_NUM_THREADS": "7", "HOME": "/"})
    for name in ("OMP_WAIT_POLICY", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "LD_PRELOAD"):
        assert key != forking.key_of({**base, name: "1"}), name


def test_a_server_without_children_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "IDLE_SECONDS", 0.05)
    server = forking.ForkServerLink(os.environ, "json")
    wait_until(lambda: not server.is_running(), "it still runs")
    server.close()


def test_without_a_server_a_worker_starts_by_itself(
    start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_arguments: object) -> None:
        raise ForkError("no more processes")

    monkeypatch.setattr(process, "fork_child", refuse)
    worker = start("w-0")
    worker.wait_for("ready")
    assert worker.server().pid == os.getpid()
    assert "starts without a fork server, and takes longer: no more processes" in caplog.text
