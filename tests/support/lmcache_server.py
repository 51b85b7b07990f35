"""LMCache's real server for tests, and a worker's side of it; skipped where its environment isn't there."""

import atexit
import functools
import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.lmcache.tier import LMCacheStore
from splitserve.kvconnector.tiers.shared import ChainCopy, TierState
from splitserve.orchestration.hosts.addresses import free_port
from splitserve.orchestration.lmcache.environment import interpreter
from splitserve.orchestration.lmcache.server import PREFIX
from splitserve.protocol.block_hash import extend_hashes, root_hash
from splitserve.protocol.memory_records import LayoutRecord
from waiting import PATIENCE_SECONDS, wait_until

CHUNK_TOKENS = 64
LAYOUT = LayoutRecord("models/demo", "weights-1", "float32", 16, 4, 2, 64)
SEGMENTS = Path("/dev/shm")


def python_with_lmcache() -> Path:
    """Return the interpreter of LMCache's environment, which `splitserve lmcache --install` makes.

    Without one the test is skipped; with SPLITSERVE_REQUIRE_LMCACHE set, as in CI, it fails.
    """
    try:
        return interpreter()
    except ConfigError as error:
        message = f"cannot run LMCache's server here: {error}"
        if os.environ.get("SPLITSERVE_REQUIRE_LMCACHE"):
            pytest.fail(message)
        pytest.skip(message)


def segments_of(keepers: Iterable[int]) -> set[str]:
    """Shared memory of the servers that these processes have watched."""
    return {path.name for pid in keepers for path in SEGMENTS.glob(f"{PREFIX}{pid}-*")}


class ProbedServer:
    """The server in a process that tells what it holds. ``backends`` are dicts, as in a cluster spec."""

    def __init__(self, *backends: dict[str, Any], port: int = 0, memory_gb: float = 0.03) -> None:
        self.port = port or free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.segment = f"{PREFIX}test-{secrets.token_hex(4)}"
        arguments = [
            *("--host", "127.0.0.1", "--port", str(self.port), "--chunk-size", str(CHUNK_TOKENS)),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", self.segment, "--no-l1-use-lazy"),
            *("--l1-size-gb", str(memory_gb), "--eviction-policy", "LRU", "--disable-observability"),
            *(part for backend in backends for part in ("--l2-adapter", json.dumps(backend))),
        ]
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        self.pid = _probes().fork(arguments, (stdin, stdout))
        self._pidfd = os.pidfd_open(self.pid)
        self._questions, self._answers = os.fdopen(questions, "wb", buffering=0), os.fdopen(answers, "rb")
        self._answer()

    def holds(self) -> dict[str, int]:
        """Return the numbers of objects that it holds for its clients."""
        self._questions.write(b"\n")
        return self._answer()

    def _answer(self) -> dict[str, int]:
        ready, _, _ = select.select([self._answers], [], [], PATIENCE_SECONDS)
        assert ready, "the server says nothing"
        line = self._answers.readline()
        assert line, "the server has ended"
        answer: dict[str, int] = json.loads(line)
        return answer

    def is_quiet(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Return whether it soon holds nothing but chunks."""
        deadline = time.monotonic() + seconds
        names = ("sessions", "prefetches", "read_locked", "write_locked", "staging_object")
        while time.monotonic() < deadline:
            held = self.holds()
            if not any(held[name] for name in names):
                return True
            time.sleep(0.1)
        return False

    def kill(self) -> None:
        """Kill it, unless it has ended, and wait for its end."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])

    def close(self) -> None:
        self.kill()
        self._questions.close()
        self._answers.close()
        os.close(self._pidfd)
        (SEGMENTS / self.segment).unlink(missing_ok=True)


class _Probes:
    """The program that forks servers. It ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        environment["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
        environment["OPENBLAS_NUM_THREADS"] = "1"  # threads of an import would not outlive a fork
        environment.pop("PYTHONPATH", None)
        program = [python_with_lmcache(), Path(__file__).with_name("lmcache_probe.py"), str(theirs.fileno())]
        self._process = subprocess.Popen(program, pass_fds=(theirs.fileno(),), env=environment, process_group=0)
        theirs.close()
        atexit.register(self._end)

    def fork(self, arguments: list[str], descriptors: tuple[int, int]) -> int:
        """Start a server with this standard input and output, which are closed here; returns its process id."""
        socket.send_fds(self._control, [json.dumps(arguments).encode()], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pid = self._control.recv(16)
        assert pid, "the program that forks servers has ended"
        return int(pid)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def _probes() -> _Probes:
    return _Probes()


@contextmanager
def probed_server(*backends: dict[str, Any], **options: Any) -> Iterator[ProbedServer]:
    server = ProbedServer(*backends, **options)
    try:
        yield server
    finally:
        server.close()


class Side:
    """The side of one worker, or one of its ranks: 64 blocks of its own, and a store."""

    def __init__(
        self, endpoint: str, layout: LayoutRecord = LAYOUT, prefetch_seconds: float = 5.0, *, rank: int = 0
    ) -> None:
        self.memory = KVMemory(layout, 64, torch.device("cpu"))
        self.states: list[TierState] = []
        self.store = LMCacheStore(self.memory, endpoint, prefetch_seconds, rank)
        self.store.open(self.states.append)

    def wait(self, is_available: bool) -> None:
        """Wait for the next state of the server."""
        wait_until(lambda: self.states and self.states[-1].is_available == is_available, lambda: self.states)

    def copy(self, token_ids: list[int], block_ids: range, first_block: int = 0, *, is_load: bool) -> ChainCopy:
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(self.memory.layout), token_ids, self.memory.layout.block_size)
        return ChainCopy(1, "lmcache", is_load, token_ids, first_block, list(block_ids), hashes[first_block:])

    def put(self, token_ids: list[int]) -> int:
        """Store the content of the first blocks."""
        return self.store.store_chain(self.copy(token_ids, range(len(token_ids) // 16), is_load=False))

    def get(self, token_ids: list[int], first_block: int = 0) -> int:
        """Load content into the last blocks."""
        num_blocks = len(token_ids) // 16 - first_block
        return self.store.load_chain(self.copy(token_ids, range(64 - num_blocks, 64), first_block, is_load=True))

    def content(self, num_blocks: int) -> torch.Tensor:
        """Return the content of the last blocks."""
        return self.memory.blocks[64 - num_blocks :]

    def __enter__(self) -> "Side":
        self.wait(is_available=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


def tokens(num_chunks: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(30000) for _ in range(num_chunks * CHUNK_TOKENS)]
