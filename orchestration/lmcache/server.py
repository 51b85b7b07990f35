"""LMCache's multiprocess server as a child of this process: started, checked, started again when it ends or hangs.

``splitserve lmcache`` is this in the foreground; a launcher whose cluster spec has a part ``lmcache`` runs it as a
child. The server runs in an environment of its own (:mod:`.environment`). It listens only at the loopback address,
since it doesn't authenticate clients, and its shared memory is removed with it, however it ends.
"""

import contextlib
import fcntl
import logging
import os
import random
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from splitserve.common.errors import ConfigError
from splitserve.common.parents import PR_SET_PDEATHSIG
from splitserve.orchestration.cluster.restarts import RestartPolicy
from splitserve.orchestration.hosts.addresses import LOOPBACK, can_listen, free_port
from splitserve.orchestration.hosts.shared_memory import SHARED_MEMORY
from splitserve.orchestration.lmcache.environment import interpreter
from splitserve.protocol.config import LMCacheConfig

START_SECONDS = 60.0
GREETING_SECONDS = 1.0
HANG_SECONDS = 20.0
STOP_SECONDS = 1.0
PIECE_BYTES = 64 << 20
"""Unit in which the server's memory is allocated."""
PREFIX = "lmcache_l1_pool_splitserve-"
"""Prefix of the servers' segments; LMCache itself adds the first part of it to the name that it is given."""
_YOUNG_SECONDS = 60.0  # between a segment's creation and its lock
_NOOP = 24  # the request that is answered by "OK"

# Ends the server's process with the thread that started it, however this process ends; its environment lacks our module
# for that. The collector is off during imports, whose objects stay alive: it would take a third of their time.
_START = f"""
import ctypes, gc, os, runpy, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
gc.disable()
import lmcache.v1.multiprocess
gc.freeze()
gc.enable()
runpy.run_module("lmcache.v1.multiprocess.server", run_name="__main__", alter_sys=True)
"""

_log = logging.getLogger(__name__)

Progress = Callable[[str, dict[str, str]], None]


def run_lmcache(config: LMCacheConfig, progress: Progress) -> None:
    """Serve until SIGINT or SIGTERM. Calls ``progress`` with "ready" and the ``endpoint`` after each start, and
    with "down" and the ``reason`` before the next one.

    Raises :class:`ConfigError` for errors that show before the server runs.
    """
    stop, signals = threading.Event(), (signal.SIGINT, signal.SIGTERM)

    def end(*_: object) -> None:
        for number in signals:  # a second one would interrupt the first where it holds the event's lock
            signal.signal(number, signal.SIG_IGN)
        stop.set()

    for number in signals:
        signal.signal(number, end)
    keeper = LMCacheServer(config, progress)
    # Not in this thread: a signal's handler would set the event while its own thread holds the event's lock.
    with ThreadPoolExecutor(1, "lmcache") as thread:
        thread.submit(keeper.run, stop).result()


class LMCacheServer:
    """LMCache server. Start it in a thread that outlives it. Raises :class:`ConfigError`."""

    def __init__(self, config: LMCacheConfig, progress: Progress) -> None:
        self._python = interpreter(config.environment)
        if not SHARED_MEMORY.is_dir():
            raise ConfigError(f"LMCache needs shared memory, and there is no {SHARED_MEMORY}")
        free = os.statvfs(SHARED_MEMORY)
        if free.f_bavail * free.f_frsize < config.memory_bytes:
            raise ConfigError(
                f"LMCache is configured with {config.memory_bytes} bytes of shared memory, but {SHARED_MEMORY} has "
                f"{free.f_bavail * free.f_frsize} left; give it less, or make that file system larger"
            )
        self._config = config
        self._port = config.port or free_port()
        self._progress = progress
        self.endpoint = f"tcp://{LOOPBACK}:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set. Raises :class:`ConfigError` if the server dies again and again soon after its
        start."""
        remove_abandoned_segments()
        policy, chosen = RestartPolicy(), random.Random()
        while not stop.is_set():
            segment = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            try:
                words, seconds_ready = self._run_once(segment, stop)
            finally:
                self._end()
                (SHARED_MEMORY / segment).unlink(missing_ok=True)
            if stop.is_set():
                return
            delay_seconds = policy.on_death(seconds_ready, chosen)
            if delay_seconds is None:
                raise ConfigError(f"LMCache's server {words}, again and again; its own messages are above")
            _log.warning("LMCache's server %s; it is started again in %.1f s", words, delay_seconds)
            self._progress("down", {"reason": words})
            stop.wait(delay_seconds)

    def _run_once(self, segment: str, stop: threading.Event) -> tuple[str, float | None]:
        """Run the server once; returns the reason of its end, and the seconds for which it was ready, None if it never
        was."""
        started, ready_at = time.monotonic(), None
        self.process = subprocess.Popen(
            [self._python, "-c", _START, str(os.getpid()), *self._arguments(segment)],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        last_answer, lock = started, None
        with _Greeter(self.endpoint) as greeter, contextlib.ExitStack() as stack:
            while not stop.wait(GREETING_SECONDS if ready_at is not None else GREETING_SECONDS / 10):
                now = time.monotonic()
                status = self.process.poll()
                if status is not None:
                    return self._reason_of_end(status, ready_at), None if ready_at is None else now - ready_at
                if greeter.has_answer():
                    last_answer = now
                    if ready_at is None:
                        ready_at = now
                        self._progress("ready", {"endpoint": self.endpoint, "pid": str(self.process.pid)})
                        _log.info("LMCache's server listens at %s after %.1f s", self.endpoint, now - started)
                    if lock is None:
                        lock = _hold_segment(segment)
                        stack.callback(os.close, lock)
                        _start_allocating(segment, stack)
                if ready_at is None and now - started > START_SECONDS:
                    return f"hasn't answered within {START_SECONDS:g} s of its start", None
                if ready_at is not None and now - last_answer > HANG_SECONDS:
                    return f"hasn't answered for {HANG_SECONDS:g} s", last_answer - ready_at
        return "was stopped", None

    def _reason_of_end(self, status: int, ready_at: float | None) -> str:
        """Return the reason in words; a server that was never ready may have found its port in use."""
        if ready_at is None and not can_listen(LOOPBACK, self._port):
            return f"can't listen on {LOOPBACK} port {self._port}, which another process uses; choose another port"
        return f"ended with status {status}"

    def _arguments(self, segment: str) -> list[str]:
        config = self._config
        backends = [part for backend in config.backends for part in ("--l2-adapter", backend)]
        return [
            *("--host", LOOPBACK, "--port", str(self._port), "--chunk-size", str(config.chunk_tokens)),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", segment, "--no-l1-use-lazy"),
            *("--l1-size-gb", repr(config.memory_bytes / (1 << 30)), "--eviction-policy", "LRU"),
            # A client that is gone must not hold anything for long.
            *("--l1-read-ttl-seconds", "60", "--l1-write-ttl-seconds", "60", "--session-ttl-seconds", "120"),
            *("--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "60"),
            *("--max-gpu-workers", "4", "--max-cpu-workers", "4", "--disable-observability"),
            *backends,
        ]

    def _end(self) -> None:
        """End the server in order, or by force."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Greeter:
    """Client that checks whether the server answers, without blocking."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.SNDHWM, 1)
        self._socket.connect(endpoint)

    def __enter__(self) -> "_Greeter":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()

    def has_answer(self) -> bool:
        """Return whether an answer has come since the last call; asks again."""
        found = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)
                found = True
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([msgspec.msgpack.encode(1), msgspec.msgpack.encode(_NOOP)], zmq.NOBLOCK)
        return found


def _environment() -> dict[str, str]:
    """Return the server's environment: without our secrets, without a GPU (the server copies nothing itself), and
    without reports of its use to third parties."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPLITSERVE_")}
    kept.pop("PYTHONPATH", None)
    kept["LMCACHE_TRACK_USAGE"] = "false"
    kept["CUDA_VISIBLE_DEVICES"] = ""
    kept.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    # The server's resource tracker removes its shared memory when it is killed, and warns about that.
    kept.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    return kept


def _hold_segment(name: str) -> int:
    """Lock the segment as in use, until the returned descriptor is closed."""
    file = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _start_allocating(segment: str, stack: contextlib.ExitStack) -> None:
    """Allocate the segment on a thread of its own, which ends with ``stack``."""
    is_over = threading.Event()
    stack.callback(is_over.set)
    threading.Thread(target=allocate, args=(segment, is_over), name="allocate", daemon=True).start()


def allocate(segment: str, is_over: threading.Event) -> None:
    """Allocate all memory of a segment; its content stays. The server only reserves address space: otherwise the first
    worker that writes to a page would allocate it, between its steps, at several times the cost of the copy itself."""
    try:
        with (SHARED_MEMORY / segment).open("r+b") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            for start in range(0, num_bytes, PIECE_BYTES):
                if is_over.is_set():
                    return
                os.posix_fallocate(file.fileno(), start, min(PIECE_BYTES, num_bytes - start))
    except OSError as error:
        if not is_over.is_set():
            _log.error(
                "the shared memory of LMCache's server can't be allocated: %s; workers continue without it", error
            )


def remove_abandoned_segments(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove segments of servers that no living process of ours keeps; returns their names. A server that is killed
    together with its parent leaves its segment behind."""
    removed = []
    for path in root.glob(f"{PREFIX}*"):
        try:
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            continue  # in use
        finally:
            os.close(file)
    return removed
