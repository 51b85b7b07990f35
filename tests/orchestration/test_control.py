"""Controlling a cluster: its messages, its socket, its folder; without any model."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.common.errors import ConfigError, WireError
from splitserve.orchestration.cli.client import LocalClient, OperationError, follow, log_lines, processes_of, status_of
from splitserve.orchestration.cli.display import describe_status
from splitserve.orchestration.cli.serve import FOLDER_VARIABLE
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.cluster.restarts import AbandonedWorker
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.cluster.roster import WorkerPhase
from splitserve.orchestration.control.requests import (
    Accepted,
    AnyRequest,
    ClusterStatus,
    DrainWorker,
    GetStatus,
    ProcessStatus,
    Refused,
    RefusedError,
    Scale,
    Stop,
    UpgradeCluster,
    UpgradeStatus,
    accepted,
    decode_reply,
    decode_request,
    encode,
)
from splitserve.orchestration.control.socket import MAX_LINE_BYTES, ControlServer, ask
from splitserve.orchestration.control.state_folder import (
    NameTakenError,
    Record,
    StateFolder,
    choose_cluster,
    known_clusters,
    state_root,
)
from splitserve.orchestration.hosts import shared_memory
from splitserve.orchestration.hosts.local import Entries
from splitserve.orchestration.hosts.log_files import read_log
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

STATUS = ClusterStatus(
    name="c",
    version="1",
    state="serving",
    model="m",
    url="http://127.0.0.1:1",
    revision=2,
    counts={"prefill": 1},
    router=ProcessStatus(name="router", phase=WorkerPhase.READY, pid=7),
    lmcache=[ProcessStatus(name="lmcache", phase=WorkerPhase.WAITING, due_in_seconds=3.2)],
    workers=[
        ProcessStatus(
            name="prefill-0",
            pool="prefill",
            role="prefill",
            phase=WorkerPhase.LEAVING,
            pid=8,
            runs_on="GPU 3",
            num_restarts=2,
            last_words="was ended by SIGKILL",
            wanted=False,
        )
    ],
    upgrade=UpgradeStatus(state=UpgradeState.FAILED, num_replaced=1, num_workers=3, problem="no memory"),
    abandoned=[AbandonedWorker("decode-0", "decode", "no such file")],
)


# ---- messages ----


@pytest.mark.parametrize(
    "request_",
    [GetStatus(), Scale("p", 3), DrainWorker("p-0"), UpgradeCluster({"model": {"path": "x"}}, True), Stop()],
)
def test_requests_travel(request_: AnyRequest) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("reply", [Accepted(), Refused("because"), STATUS])
def test_replies_travel(reply: Accepted | Refused | ClusterStatus) -> None:
    assert decode_reply(encode(reply)) == reply


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b'{"type":"Explode"}',
        b'{"type":"Scale","pool":"p"}',
        b'{"type":"Scale","pool":"p","count":"3"}',
        b'{"type":"Stop","now":true}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_wire_error(data: bytes) -> None:
    with suppress(WireError):
        decode_request(data)


def test_a_refusal_is_an_error_with_its_reason() -> None:
    accepted(Accepted())
    with pytest.raises(RefusedError, match="because"):
        accepted(Refused("because"))


def test_status_for_people() -> None:
    assert describe_status(STATUS).splitlines() == [
        "c: serving, m at http://127.0.0.1:1",
        "  router       ready     pid 7",
        "  lmcache      waiting   starts in 3 s",
        "  prefill-0    leaving   pid 8, GPU 3, restarted 2 times, revision 1, won't come back, "
        "before: was ended by SIGKILL",
        "  decode-0     abandoned no such file; decode has 0: `splitserve scale` starts another one",
        "  upgrade failed, 1 of 3 workers replaced: no memory",
    ]


# ---- the socket ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "control.sock"

    def answer(request: AnyRequest) -> Accepted | Refused:
        return Refused("no such pool") if isinstance(request, Scale) else Accepted()

    server = ControlServer(path, answer)
    yield path
    server.close()
    assert not path.exists()


def test_requests_over_the_socket(server: Path) -> None:
    assert ask(server, Stop()) == Accepted()
    assert ask(server, Scale("x", 1)) == Refused("no such pool")
    assert stat.S_IMODE(server.stat().st_mode) == 0o600


@pytest.mark.parametrize("data", [b"", b"nonsense\n", b"x" * (MAX_LINE_BYTES + 1), b'{"type":"Stop"'])
def test_the_socket_survives_nonsense(server: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(server))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except OSError:
            answer = b""
        assert not answer or isinstance(decode_reply(answer), Refused)
    assert ask(server, Stop()) == Accepted()


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the cluster doesn't answer at .*: No such file"):
        ask(tmp_path / "nowhere", GetStatus())
    with pytest.raises(ConfigError, match="SPLITSERVE_STATE_DIR to a shorter folder"):
        ControlServer(tmp_path / ("x" * 120), lambda _request: Accepted())


# ---- the folder ----


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))


def test_a_name_is_taken_while_its_cluster_lives() -> None:
    first, second = StateFolder("c"), StateFolder("c")
    assert not first.is_claimed()
    first.claim()
    assert second.is_claimed()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    with pytest.raises(NameTakenError, match=r"called c is running already.*splitserve down --name c"):
        second.claim()
    first.write(Record(name="c", launcher_pid=5))
    assert second.read() == Record(name="c", launcher_pid=5)
    first.remove()
    assert not state_root().exists()
    second.claim()
    assert second.read() is None
    second.remove()


def test_the_folder_of_a_killed_launcher_can_be_claimed() -> None:
    program = (
        "from splitserve.orchestration.control.state_folder import *\n"
        "import time; StateFolder('c').claim(); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert StateFolder("c").is_claimed()
        process.kill()
        process.wait()
    folder = StateFolder("c")
    assert not folder.is_claimed() and [each.name for each in known_clusters()] == ["c"]
    folder.claim()
    folder.remove()


def test_the_only_cluster_needs_no_name() -> None:
    with pytest.raises(ConfigError, match="no cluster is known"):
        choose_cluster("")
    dead, alive = StateFolder("dead"), StateFolder("alive")
    dead.claim()
    os.close(dead._lock_fd or -1)
    assert choose_cluster("").name == "dead"
    alive.claim()
    assert choose_cluster("").name == "alive"
    assert choose_cluster("dead").name == "dead"
    with pytest.raises(ConfigError, match="no cluster called other; there are alive, dead"):
        choose_cluster("other")
    more = StateFolder("more")
    more.claim()
    with pytest.raises(ConfigError, match="there are several clusters: give --name"):
        choose_cluster("")
    for folder in (alive, more):
        folder.remove()


def test_abandoned_shared_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    held, abandoned = shared_memory.SharedMemoryFolder("held"), shared_memory.SharedMemoryFolder("abandoned")
    os.close(abandoned._lock_fd)
    young = tmp_path / "splitserve-1-young"
    young.mkdir()
    for path in (held.path, abandoned.path):
        os.utime(path, (0, 0))
    (tmp_path / "something-else").mkdir()
    assert shared_memory.remove_abandoned(tmp_path) == [Path(abandoned.path).name]
    child = shared_memory.hold_folder(held.path)
    os.close(held._lock_fd)
    assert shared_memory.remove_abandoned(tmp_path) == [], "the child still holds it"
    os.close(child)
    assert shared_memory.remove_abandoned(tmp_path) == [Path(held.path).name]


# ---- a cluster of small processes ----

ENTRIES = Entries(router="launcher_children:run_router", worker="launcher_children:run_worker")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    )
    spec = simple_spec(EngineConfig(model="./some/model"), port=0, num_prefill=1, num_decode=2)
    logs = tmp_path / "logs"
    logs.mkdir()
    folder = tmp_path / "folder"
    with LocalCluster(
        spec, entries=ENTRIES, num_cores=4, log_folder=logs, environment={FOLDER_VARIABLE: str(folder)}
    ) as running:
        assert len(processes_of(folder)) == 4
        with running.supervised():
            yield running
    assert processes_of(folder) == []


class Client:
    """A cluster in this process, asked as from outside."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def ask(self, request: AnyRequest):
        return decode_reply(encode(self._cluster.ask(decode_request(encode(request)))))


def test_a_cluster_is_scaled_drained_and_upgraded(cluster: LocalCluster) -> None:
    client, said = Client(cluster), []
    before = status_of(client)
    assert (before.state, before.counts, before.router.pid) == (
        "serving",
        {"prefill": 1, "decode": 2},
        cluster.pids["router"],
    )
    assert client.ask(Scale("decode", 3)) == Accepted()
    status = follow(
        client, said.append, lambda status: status.is_settled and status.counts["decode"] == 3, 4, since=before
    )
    assert "  decode-2   ready" in said
    assert client.ask(DrainWorker("decode-0")) == Accepted()
    follow(client, said.append, lambda status: len(status.workers) == 3, 3, since=status)
    assert "  decode-0   gone" in said
    pids = cluster.pids
    assert client.ask(UpgradeCluster()) == Accepted()
    assert isinstance(client.ask(Scale("decode", 1)), Refused), "not during an upgrade"
    status = follow(
        client, said.append, lambda status: status.upgrade is not None and status.upgrade.state == "done", 3
    )
    assert status.upgrade is not None and status.upgrade.num_replaced == 3 and status.revision == 2
    assert not set(pids.values()) & set(cluster.pids.values()) - {pids["router"]}
    assert cluster.ready == {worker.name for worker in status.workers}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Scale("cache", 1), "no pool 'cache'"),
        (Scale("decode", 0), "the cluster couldn't serve"),
        (DrainWorker("prefill-0"), "scale prefill up first"),
        (UpgradeCluster({"model": {"path": "x"}}), "pools: is missing"),
        (UpgradeCluster({"model": {"path": "x"}, "pools": [{"name": "p", "role": "mixed"}]}), "keeps pools and roles"),
    ],
)
def test_what_cannot_be_is_refused_in_words(cluster: LocalCluster, request_: AnyRequest, reason: str) -> None:
    reply = Client(cluster).ask(request_)
    assert isinstance(reply, Refused) and reason in reply.reason
    assert len(cluster.ready) == 3


def test_a_successor_that_fails_ends_the_upgrade(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(cluster)
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "prefill-1=refuse")
    assert client.ask(UpgradeCluster()) == Accepted()
    status = follow(
        client, lambda _line: None, lambda status: status.upgrade is not None and status.upgrade.state != "running", 3
    )
    assert status.upgrade is not None and status.upgrade.state == "failed"
    assert "prefill-1: model.norm.weight is missing" in status.upgrade.problem
    assert cluster.ready == {"prefill-0", "decode-0", "decode-1"}


def test_a_worker_that_is_given_up_ends_the_wait(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.orchestration.cluster.restarts.MAX_QUICK_DEATHS", 1)
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "decode-2=refuse")
    client, said = Client(cluster), list[str]()
    assert client.ask(Scale("decode", 3)) == Accepted()
    with pytest.raises(OperationError, match=r"was abandoned.*model\.norm\.weight is missing"):
        follow(client, said.append, lambda status: status.is_settled and status.counts["decode"] == 3, 4)
    assert any("decode-2   waiting: model.norm.weight is missing" in line for line in said)
    [abandoned] = status_of(client).abandoned
    assert abandoned.name == "decode-2" and "model.norm.weight is missing" in abandoned.last_words


def test_logs_are_kept_and_followed(cluster: LocalCluster, tmp_path: Path) -> None:
    class Folder(StateFolder):
        logs = tmp_path / "logs"

        def is_claimed(self) -> bool:
            """Asked after each look at the logs. It ends after ``num_looks``; between the first two, more is logged."""
            self.num_looks -= 1
            if self.num_looks == 1:
                with (self.logs / "decode-0.log").open("a") as log:
                    log.write("more\nand half a li")
                (self.logs / "decode-2.log").write_text("a newcomer\n")
            return self.num_looks > 0

    folder = Folder("c")
    client = LocalClient(folder)
    assert client.log_names() == ["decode-0", "decode-1", "prefill-0", "router"]
    (folder.logs / "prefill-0.log").write_text("".join(f"line {i}\n" for i in range(1000)))
    folder.num_looks = 1
    assert list(log_lines(client, "prefill-0", 2, follow=True)) == ["prefill-0: line 998", "prefill-0: line 999"]
    with pytest.raises(ConfigError, match="no log of 'prefill-9'; there are decode-0"):
        list(log_lines(client, "prefill-9", 1, follow=False))
    folder.num_looks = 2
    assert list(log_lines(client, "", 0, follow=True)) == ["decode-0: more", "decode-2: a newcomer"]


def test_reading_a_log_that_was_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert read_log(path, 5, -1) == ("", 0)
    path.write_text("one\ntwo\nthr")
    assert read_log(path, 1, -1) == ("two\n", 8)
    path.write_text("one\ntwo\nthree\n")
    assert read_log(path, 1, 8) == ("three\n", 14)
    path.write_text("anew\n")
    assert read_log(path, 1, 14) == ("anew\n", 5)
