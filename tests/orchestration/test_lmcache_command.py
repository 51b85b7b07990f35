"""LMCache in a cluster spec, its environment, and `splitserve lmcache`: what is refused, and what is left behind."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_server import SEGMENTS, python_with_lmcache, segments_of
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.main import main
from splitserve.orchestration.cluster.restarts import Revival
from splitserve.orchestration.lmcache import environment as lmcache_environment
from splitserve.orchestration.lmcache.server import PREFIX, LMCacheServer, remove_abandoned_segments
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import parse_spec, to_yaml
from splitserve.orchestration.spec.expansion import Secrets, worker_config
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, LMCacheConfig
from waiting import PATIENCE_SECONDS, wait_until

POOLS = """
model: {path: m}
pools:
  - {name: prefill, role: prefill, count: 2, memory: {kv: 1GiB}}
  - {name: decode, role: decode, lmcache: false}
"""


def spec(lmcache: str) -> ClusterSpec:
    return parse_spec(POOLS + f"lmcache: {lmcache}\n")


def endpoint_of(made: ClusterSpec, pool: str, started: str = "") -> str:
    config = worker_config(
        made, made.pool(pool), f"{pool}-0", Secrets(), membership="m", host="h", threads=1, lmcache_endpoint=started
    )
    return config.engine.lmcache_endpoint


def test_a_server_of_the_clusters_own() -> None:
    made = spec("{memory: 2GiB, chunk_tokens: 64, backends: [{type: fs, base_path: /tmp/x}]}")
    assert made.lmcache_config() == LMCacheConfig(
        memory_bytes=2 << 30, chunk_tokens=64, backends=('{"type":"fs","base_path":"/tmp/x"}',)
    )
    assert endpoint_of(made, "prefill", "tcp://127.0.0.1:7") == "tcp://127.0.0.1:7"
    assert endpoint_of(made, "decode", "tcp://127.0.0.1:7") == ""
    assert parse_spec(to_yaml(made)) == made


def test_a_server_that_is_there() -> None:
    made = spec("{endpoint: 'tcp://127.0.0.1:7'}")
    assert made.lmcache_config() is None
    assert (endpoint_of(made, "prefill"), endpoint_of(made, "decode")) == ("tcp://127.0.0.1:7", "")
    short = simple_spec(EngineConfig(model="m", lmcache_endpoint="tcp://127.0.0.1:7"), num_mixed=1)
    assert endpoint_of(short, "mixed") == "tcp://127.0.0.1:7"


def test_none() -> None:
    made = parse_spec(POOLS)
    assert made.lmcache_config() is None
    assert endpoint_of(made, "prefill") == ""
    off = parse_spec(POOLS.replace("memory: {kv: 1GiB}", "lmcache: false") + "lmcache: {}\n")
    assert off.lmcache_config() is None, "nobody would use it"


@pytest.mark.parametrize(
    ("lmcache", "words"),
    [
        ("{endpoint: 'tcp://127.0.0.1:7', memory: 2GiB}", "lmcache: endpoint is that of a server that runs already"),
        *(
            (f"{{endpoint: '{endpoint}'}}", rf"lmcache.endpoint: .*must be on this machine.* got '{endpoint}'")
            for endpoint in ("127.0.0.1:7", "http://127.0.0.1:7", "tcp://10.9.9.9:7")
        ),
        ("{memory: 7}", "lmcache.memory: must be between 1048576 and 1152921504606846976, got 7"),
        ("{memory: much}", "lmcache.memory"),
        ("{backends: [{base_path: /x}]}", r"lmcache.backends\[0\]: has no type"),
        ("{chunk_tokens: 0}", "lmcache.chunk_tokens"),
        ("{size: 1}", "there is no such setting"),
    ],
)
def test_what_a_spec_cannot_say(lmcache: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec(lmcache)


def test_chunks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="48 isn't a multiple of the block size 32"):
        parse_spec(POOLS + "engine: {block_size: 32}\nlmcache: {chunk_tokens: 48}\n")
    with pytest.raises(ConfigError, match="100 isn't a multiple of the block size 16"):
        parse_spec(POOLS + "lmcache: {chunk_tokens: 100}\n")
    parse_spec(POOLS.replace("count: 2", "tensor_parallel_size: 2") + "lmcache: {}\n")


# ---- the environment and the server ----


def test_an_environment_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lmcache", "--environment", str(tmp_path / "none")]) == 2
    assert "make it with `splitserve lmcache --install`" in capsys.readouterr().err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(ConfigError, match="there is no LMCache in"):
        lmcache_environment.interpreter(str(tmp_path))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    python_with_lmcache()
    monkeypatch.setattr(lmcache_environment, "LMCACHE_VERSION", "0.4.0")
    with pytest.raises(ConfigError, match=r"has LMCache \d+\.\d+\.\d+; this version works with 0\.4\.0"):
        lmcache_environment.interpreter()


@pytest.mark.parametrize("backend", ["{", '{"base_path": "/x"}', "[]"])
def test_a_back_end_that_is_none(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lmcache", "--backend", backend]) == 2
    assert "--backend" in capsys.readouterr().err


def test_more_memory_than_there_is() -> None:
    python_with_lmcache()
    with pytest.raises(ConfigError, match="bytes of shared memory, but /dev/shm has"):
        LMCacheServer(LMCacheConfig(memory_bytes=1 << 60), lambda *_: None)


def test_segments_that_nobody_keeps_are_removed(tmp_path: Path) -> None:
    old = time.time() - 3600
    for name in ("left", "kept"):
        path = tmp_path / f"{PREFIX}{name}"
        path.touch()
        os.utime(path, (old, old))
    (tmp_path / f"{PREFIX}young").touch()
    (tmp_path / "lmcache_l1_pool_of_somebody_else").touch()
    with (tmp_path / f"{PREFIX}kept").open() as kept:
        fcntl.flock(kept, fcntl.LOCK_SH)
        assert remove_abandoned_segments(tmp_path) == [f"{PREFIX}left"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{PREFIX}kept", f"{PREFIX}young", "lmcache_l1_pool_of_somebody_else",
    }  # fmt: skip


def test_a_process_that_others_can_do_without() -> None:
    revival = Revival()
    assert revival.due_at == float("inf")
    revival.on_ready(10.0)
    revival.on_exit(100.0)
    assert revival.due_at == 100.0, "at once: it had served for long"
    revival.on_exit(101.0)
    assert 101.0 < revival.due_at < 102.0
    for _ in range(20):
        revival.on_exit(200.0)
    assert revival.due_at == float("inf"), "given up"


def test_the_command_starts_a_server_again_and_leaves_nothing() -> None:
    python_with_lmcache()
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "lmcache", "--port", "0", "--memory", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("Ready: tcp://127.0.0.1:"), first
        [server] = children_of(process.pid)
        os.kill(server, signal.SIGKILL)
        assert process.stdout.readline() == first, "at the same place"
        [segment] = segments_of([process.pid])
        path = SEGMENTS / segment
        wait_until(lambda: path.stat().st_blocks * 512 >= 16 << 20, "its memory isn't allocated")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not segments_of([process.pid])


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
