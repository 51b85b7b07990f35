"""Child process as its parent sees it: start, progress, orderly end."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec

from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.hosts.child import Config, Order, Progress
from splitserve.orchestration.hosts.forking import ForkError, can_fork, fork_child
from splitserve.orchestration.hosts.log_files import keep_short, open_log
from splitserve.orchestration.hosts.shared_memory import SharedMemoryFolder
from splitserve.orchestration.spec.cluster_spec import SECRET_VARIABLES
from splitserve.protocol.config import LMCacheConfig, RouterConfig, WorkerConfig

# Threads of an OpenMP pool spin before they sleep. libgomp's default of 300,000 turns holds a core for so long
# after each parallel region that it slows the neighbours of an idle worker. A fifteenth of it is still longer than the
# gaps between the operations of a step.
_OPENMP_SPIN_TURNS = "20000"


def child_environment(threads: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` plus the variables that must be set before torch, tokenizers and NIXL are imported. ``threads`` 0
    leaves thread counts.

    Variables that the user has set already win, thread counts excepted: those follow ``--threads``. Secrets are left
    out: they travel in the config.
    """
    defaults = {
        "GOMP_SPINCOUNT": _OPENMP_SPIN_TURNS,
        "KMP_BLOCKTIME": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NIXL_LOG_LEVEL": "WARN",
        "PYTHONUNBUFFERED": "1",
    }
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS") if threads else ()
    inherited = {name: value for name, value in base.items() if name not in SECRET_VARIABLES}
    return {**defaults, **inherited, **dict.fromkeys(counts, str(threads))}


_log = logging.getLogger(__name__)

_KINDS: dict[type[Config], Literal["router", "worker", "lmcache"]] = {
    RouterConfig: "router",
    WorkerConfig: "worker",
    LMCacheConfig: "lmcache",
}


def progress_of(status: IO[bytes]) -> Iterator[Progress]:
    """Yield the progress from a status pipe, up to its end. Drops the half line that a killed process may leave."""
    for line in status:
        try:
            yield msgspec.json.decode(line, type=Progress)
        except msgspec.DecodeError:
            _log.debug("half a line of progress: %r", line)


class Started(Protocol):
    """Started process: :class:`subprocess.Popen`, or the child of a fork server."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, signal_number: int, /) -> None: ...
    def kill(self) -> None: ...


def _start(
    variables: Mapping[str, str],
    life_line: int,
    log: IO[bytes] | None,
    status_fd: int,
    listener: Sequence[int],
    *,
    preloaded: str,
) -> Started:
    """Start a process that reads its order from ``life_line``. ``log`` None: its output is this process's.
    ``listener``: descriptor of its listening socket, if it gets one. ``preloaded``: see :class:`ChildProcess`."""
    if preloaded:
        output = (1, 2) if log is None else (log.fileno(), log.fileno())
        try:
            return fork_child(variables, preloaded, (life_line, *output, status_fd, *listener))
        except ForkError as error:
            _log.warning("a process starts without a fork server, and takes longer: %s", error)
    return subprocess.Popen(
        [sys.executable, "-m", "splitserve.orchestration.hosts.child"],
        stdin=life_line,
        stdout=log,
        stderr=log,
        pass_fds=(status_fd, *listener),
        env=variables,
        # A terminal's Ctrl-C reaches the launcher alone. But no session of its own: Linux shares a core between
        # sessions first, so a thread wouldn't get one at once that another worker keeps awake.
        process_group=0,
    )


class ChildProcess:
    """Running child of this process. ``emit`` gets its progress and, last, its exit, on another thread.

    Its log is appended to ``log_file``, which is kept short; None: it goes to this process's own output.
    ``preloaded``: a fork server that has imported this module starts it, if the platform can; "": none. ``forks``: see
    :class:`Order`. ``listener``: a listening socket that it shares with others.
    """

    def __init__(
        self,
        *,
        name: str,
        entry: str,
        config: Config,
        threads: int,
        log_level: str,
        emit: Callable[[Event], None],
        environment: Mapping[str, str] | None = None,
        runs_on: str = "",
        log_file: Path | None = None,
        preloaded: str = "",
        forks: str = "",
        listener: socket.socket | None = None,
    ) -> None:
        self.name = name
        self.runs_on = runs_on
        self.error_message = ""
        self._emit = emit
        self._shared_memory = SharedMemoryFolder(name) if isinstance(config, WorkerConfig) else None
        read_fd, write_fd = os.pipe()
        life_line, our_end = os.pipe()
        self._life_line = os.fdopen(our_end, "wb")
        order = Order(
            name=name,
            kind=_KINDS[type(config)],
            entry=entry,
            forks=forks,
            config=msgspec.Raw(msgspec.json.encode(config)),
            status_fd=write_fd,
            listener_fd=-1 if listener is None else listener.fileno(),
            shared_memory=self._shared_memory.path if self._shared_memory else "",
            log_level=log_level,
            # The signal follows the thread that forked. Only the main thread lives as long as the process.
            parent_death_signal=threading.current_thread() is threading.main_thread(),
        )
        variables = child_environment(threads, {**self._defaults(), **os.environ, **(environment or {})})
        try:
            with open_log(log_file) as log:
                shared = () if listener is None else (listener.fileno(),)
                preloaded = preloaded if can_fork() else ""
                self._process = _start(variables, life_line, log, write_fd, shared, preloaded=preloaded)
        except OSError:
            os.close(read_fd)
            self._life_line.close()
            self._remove_shared_memory()
            raise
        finally:
            os.close(write_fd)
            os.close(life_line)
        self._ended = threading.Event()
        if log_file is not None:
            keep_short(log_file, self._ended)
        self._send_order(order)
        self._reader = threading.Thread(target=self._read_status, args=(read_fd,), name=f"status-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, signal_number: int) -> None:
        """Send a signal, unless the child has ended."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; returns False if it hasn't come in time."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join()
        with suppress(BrokenPipeError):  # an order that was never read
            self._life_line.close()
        self._remove_shared_memory()
        return True

    def describe_exit(self, returncode: int) -> str:
        """Return the reason of the end, in one line without the name: the child's own message if it left one."""
        if self.error_message:
            return self.error_message
        if returncode >= 0:
            return f"ended with exit status {returncode}"
        try:
            return f"was ended by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was ended by signal {-returncode}"

    def _defaults(self) -> dict[str, str]:
        return {"UCX_POSIX_DIR": self._shared_memory.path} if self._shared_memory and self._shared_memory.path else {}

    def _remove_shared_memory(self) -> None:
        if self._shared_memory is not None:
            self._shared_memory.remove()

    def _send_order(self, order: Order) -> None:
        try:
            self._life_line.write(msgspec.json.encode(order) + b"\n")
            self._life_line.flush()
        except BrokenPipeError:
            pass  # the child died before it could read; its exit event reports that

    def _read_status(self, read_fd: int) -> None:
        """Read progress until the pipe's end, which is the child's end: no other process holds the writing end."""
        with os.fdopen(read_fd, "rb") as status:
            for progress in progress_of(status):
                if progress.stage == "error":
                    self.error_message = progress.detail["message"]
                self._emit(ChildProgress(self.name, progress.stage, progress.detail))
        returncode = self._process.wait()
        self._ended.set()
        self._emit(ChildExited(self.name, returncode))
