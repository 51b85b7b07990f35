"""Starts of clusters whose LMCache server can't start: they fail, and the message has the reason. One that has answered
is started again instead, as later."""

import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.orchestration.cluster.launcher import Entries, LaunchError, LocalCluster
from splitserve.orchestration.hosts.addresses import LOOPBACK, port_of
from splitserve.orchestration.lmcache.environment import LMCACHE_VERSION
from splitserve.orchestration.spec.cluster_spec import LMCacheSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.orchestration.spec.start_checks import address_problems
from splitserve.protocol.config import EngineConfig

ENTRIES = Entries(router="launcher_children:run_router", worker="launcher_children:run_worker")
SUPPORT = Path(__file__).parents[1] / "support"
SERVER_THAT_CRASHES = f"""#!/bin/sh
case "$2" in *importlib.metadata*) echo {LMCACHE_VERSION}; exit 0;; esac
sleep 0.7  # workers are ready before it ends
echo "the server has a bad day" >&2
exit 3
"""
# Answers until it has said so often enough that its keeper knows; then ends. Its second life goes on.
SERVER_THAT_ENDS_ONCE = """
import os, pathlib, sys
import zmq
arguments, marker = sys.argv, pathlib.Path(sys.argv[1])
pathlib.Path("/dev/shm", arguments[arguments.index("--shm-name") + 1]).write_bytes(bytes(4096))
is_second = marker.with_suffix(".first").exists()
server = zmq.Context().socket(zmq.ROUTER)
server.bind("tcp://127.0.0.1:" + arguments[arguments.index("--port") + 1])
if is_second:
    marker.touch()
num_answers = 0
while is_second or num_answers < 6:
    client, *_ = server.recv_multipart()
    server.send_multipart([client, b"OK"])
    num_answers += 1
marker.with_suffix(".first").touch()
sys.exit(3)
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another process listens."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        yield port_of(listener)


def cluster_with_crashing_server(folder: Path, port: int) -> LocalCluster:
    return cluster_with_server(folder, port, SERVER_THAT_CRASHES)


def cluster_with_server(folder: Path, port: int, script: str) -> LocalCluster:
    """Return a cluster with this script in place of the interpreter of LMCache's environment."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(script)
    python.chmod(0o755)
    spec = simple_spec(
        EngineConfig(model="./some/model"),
        num_mixed=1,
        port=0,
        lmcache=LMCacheSpec(memory="1MiB", port=port, environment=str(folder)),
    )
    return LocalCluster(spec, entries=ENTRIES, num_cores=1)


@pytest.fixture(autouse=True)
def _children_import_from_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def test_a_server_that_crashes_fails_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_with_crashing_server(tmp_path, 0)
    with pytest.raises(LaunchError, match=r"lmcache: its server ended with status 3; the log of lmcache has"), cluster:
        pass
    assert not cluster.pids
    assert "the server has a bad day" in capfd.readouterr().err


def test_a_server_that_ends_after_it_has_answered_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is ready once there is a second server, so the start sees the end of the first."""
    second = tmp_path / "server.second"
    monkeypatch.setenv("SPLITSERVE_TEST_BEHAVIOUR", "mixed-0=awaits-file")
    monkeypatch.setenv("SPLITSERVE_TEST_AWAITED", str(second))
    server = tmp_path / "server.py"
    server.write_text(SERVER_THAT_ENDS_ONCE)
    run = shlex.join(["exec", sys.executable, str(server), str(second)])
    script = SERVER_THAT_CRASHES.partition("sleep")[0] + f'{run} "$@"\n'
    with cluster_with_server(tmp_path, 0, script) as cluster:
        assert second.exists() and cluster.state == "serving" and set(cluster.pids) == {"router", "mixed-0", "lmcache"}


def test_a_port_in_use_fails_the_start(tmp_path: Path, taken: int) -> None:
    """As when another process takes it between the checks and the start."""
    words = f"lmcache: its server can't listen on 127.0.0.1 port {taken}, which another process uses"
    with pytest.raises(LaunchError, match=words), cluster_with_crashing_server(tmp_path, taken):
        pass


def test_a_port_in_use_is_found_before_anything_starts(taken: int) -> None:
    for lmcache, locations in (
        (LMCacheSpec(port=taken), ["lmcache.port"]),
        (LMCacheSpec(port=0), []),
        (LMCacheSpec(endpoint=f"tcp://{LOOPBACK}:{taken}"), []),
    ):
        spec = simple_spec(EngineConfig(model="./some/model"), num_mixed=1, port=0, lmcache=lmcache)
        problems = list(address_problems(spec))
        assert [location for location, _ in problems] == locations
        assert all(f"port {taken}: another process uses it" in words for _, words in problems)
