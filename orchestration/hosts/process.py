"""Child process as its parent sees it: start, progress, orderly end."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
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
    def wait(self) -> int: ...
    def send_signal(self, signal_number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Program:
    """Program of a child: environment, folder, log, listening socket."""

    environment: Mapping[str, str]
    folder: str  # the working directory
    log_file: Path | None  # None: its output is this process's
    listener: socket.socket | None  # its listening socket, if it gets one
    preloaded: str  # see :class:`ChildProcess`

    def start(self, life_line: int, status_fd: int) -> Started:
        """Start the process, which reads its order from ``life_line``; a fork server may first import its modules."""
        shared = () if self.listener is None else (self.listener.fileno(),)
        with open_log(self.log_file) as log:
            if self.preloaded and can_fork():
                output = (1, 2) if log is None else (log.fileno(), log.fileno())
                descriptors = (life_line, *output, status_fd, *shared)
                try:
                    return fork_child(self.environment, self.folder, self.preloaded, descriptors)
                except ForkError as error:
                    _log.warning("a process starts without a fork server, and takes longer: %s", error)
            return subprocess.Popen(
                [sys.executable, "-m", "splitserve.orchestration.hosts.child"],
                stdin=life_line,
                stdout=log,
                stderr=log,
                pass_fds=(status_fd, *shared),
                env=self.environment,
                cwd=self.folder,
                # A terminal's Ctrl-C reaches the launcher alone. But no session of its own: Linux shares a core between
                # sessions first, so a thread wouldn't get one at once that another worker keeps awake.
                process_group=0,
            )


class ChildProcess:
    """Child of this process. A thread of its own starts it, since a fork server may have to import first, and calls
    ``emit``: with stage ``started`` (detail ``pid``), with the child's progress and, last, with its exit.

    Its log is appended to ``log_file``, which is kept short; None: it goes to this process's own output.
    ``preloaded``: a fork server that has imported this module starts it, if the platform can; "": none. ``forks``,
    ``early``: see :class:`Order`. ``listener``: a listening socket that it shares with others.
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
        early: str = "",
        listener: socket.socket | None = None,
    ) -> None:
        self.name = name
        self.runs_on = runs_on
        self.error_message = ""
        self._emit = emit
        self._shared_memory = SharedMemoryFolder(name) if isinstance(config, WorkerConfig) else None
        shared_memory = self._shared_memory.path if self._shared_memory else ""
        order = Order(
            name=name,
            kind=_KINDS[type(config)],
            entry=entry,
            forks=forks,
            early=early,
            config=msgspec.Raw(msgspec.json.encode(config)),
            listener_fd=-1 if listener is None else listener.fileno(),
            shared_memory=shared_memory,
            log_level=log_level,
        )
        defaults = {"UCX_POSIX_DIR": shared_memory} if shared_memory else {}
        variables = child_environment(threads, {**defaults, **os.environ, **(environment or {})})
        program = _Program(variables, os.getcwd(), log_file, listener, preloaded)
        self._process: Started | None = None
        self._early_signals: list[int] = []  # which came before the process ran
        self._signals_lock = threading.Lock()  # guards the two
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(program, order), name=f"child-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id; 0 until the process runs."""
        return 0 if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def send_signal(self, signal_number: int) -> None:
        """Send a signal, unless the child has ended. Doesn't wait for its start, right after which it gets those that
        came before."""
        with self._signals_lock:
            if self._process is None:
                self._early_signals.append(signal_number)
            else:
                self._process.send_signal(signal_number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; returns False if it hasn't come in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

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

    def _run(self, program: _Program, order: Order) -> None:
        """Start the child, follow it to its end, and remove what it left."""
        returncode = 1
        try:
            returncode = self._start_and_follow(program, order)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if self._process is None:
                self.error_message = f"can't be started: {problem}"
            else:
                self._process.kill()
                returncode = self._process.wait()
                self.error_message = f"was ended by its launcher, which could not follow it: {problem}"
        finally:
            self._ended.set()
            if self._shared_memory is not None:
                self._shared_memory.remove()
            self._emit(ChildExited(self.name, returncode))

    def _start_and_follow(self, program: _Program, order: Order) -> int:
        """Return the exit status. Any error ends the child."""
        read_fd, write_fd = os.pipe()
        try:
            life_line_fd, our_end = os.pipe()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        with os.fdopen(read_fd, "rb") as status, os.fdopen(our_end, "wb", buffering=0) as life_line:
            try:
                process = self._start(program, life_line_fd, write_fd)
            finally:
                os.close(write_fd)
                os.close(life_line_fd)
            self._emit(ChildProgress(self.name, "started", {"pid": str(process.pid)}))
            if program.log_file is not None:
                keep_short(program.log_file, self._ended)
            with suppress(BrokenPipeError):  # it died before it could read; its exit event reports that
                life_line.write(msgspec.json.encode(msgspec.structs.replace(order, status_fd=write_fd)) + b"\n")
            # Up to the pipe's end, which is the child's end: no other process holds the writing end.
            for progress in progress_of(status):
                if progress.stage == "error":
                    self.error_message = progress.detail["message"]
                self._emit(ChildProgress(self.name, progress.stage, progress.detail))
            return process.wait()

    def _start(self, program: _Program, life_line: int, status_fd: int) -> Started:
        """Start the process, and send it the signals that came meanwhile."""
        process = program.start(life_line, status_fd)
        with self._signals_lock:
            self._process = process
            for signal_number in self._early_signals:
                process.send_signal(signal_number)
        return process
