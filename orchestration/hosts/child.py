"""Main of a child process, which :mod:`.process` alone starts: as a program, or as a child of a fork server.

Contract with the parent:

- the first line of standard input is an :class:`Order` as JSON. The pipe then stays open: its end means that
  the parent is gone, however it died, and ends this process too;
- the status pipe carries :class:`Progress` as JSON lines. Stage ``error`` gives the reason of the end in one line;
- SIGINT ends the process in order, at once. SIGTERM ends it in order, a worker once it has drained. Exit status: 0
  after a signal, 2 for an error that the user can correct, 1 for any other.
"""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from io import FileIO
from typing import Literal

import msgspec

from splitserve.common.cores import awake_cpus, usable_cpus
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.common.parents import ask_for_death_signal
from splitserve.orchestration.hosts.affinity import bind_process
from splitserve.orchestration.hosts.shared_memory import hold_folder
from splitserve.protocol.config import LMCacheConfig, RouterConfig, WorkerConfig

ORPHAN_GRACE_SECONDS = 3.0

_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a child process."""

    name: str
    kind: Literal["router", "worker", "lmcache"]
    entry: str  # ``module:function``, called with its config and a callable for progress
    # ``module:function`` that forks processes of the child's own, or "". A child of a fork server calls it with its
    # config before it has a thread.
    forks: str = ""
    # ``module:function``, called with its config before the entry is imported, if that takes long; or "".
    early: str = ""
    config: msgspec.Raw
    status_fd: int = -1  # set when it is started; a child of a fork server has another
    listener_fd: int = -1  # likewise; -1: it gets no listening socket
    log_level: str = "info"
    shared_memory: str = ""  # a folder to remove at the end, in case the parent is gone by then


class Progress(msgspec.Struct, frozen=True):
    """Step that a child has made; ``detail`` is for people and for the launcher."""

    stage: str
    detail: dict[str, str]


Config = RouterConfig | WorkerConfig | LMCacheConfig
Entry = Callable[[Config, Callable[[str, dict[str, str]], None]], None]


class StatusPipe:
    """Writer of progress to the parent. Ignores a parent that is gone: the life line ends this process then."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # this pipe's end must mean the end of this process, whatever processes it starts
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._lock = threading.Lock()

    def report(self, stage: str, detail: dict[str, str]) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(msgspec.json.encode(Progress(stage, detail)) + b"\n")
            except BrokenPipeError:
                _log.warning("progress %r has no reader any more", stage)

    def close(self) -> None:
        """Close the pipe: no more progress follows."""
        with self._lock:
            self._file.close()


def config_of(order: Order) -> Config:
    if order.kind == "router":
        config = msgspec.json.decode(order.config, type=RouterConfig)
        return msgspec.structs.replace(config, listener_fd=order.listener_fd)
    if order.kind == "lmcache":
        return msgspec.json.decode(order.config, type=LMCacheConfig)
    return msgspec.json.decode(order.config, type=WorkerConfig)


def stays_awake(config: Config) -> bool:
    """Return whether the process stays on cores that are kept awake."""
    if isinstance(config, WorkerConfig):
        return config.engine.keep_cores_awake
    return isinstance(config, RouterConfig) and config.on_awake_cores


def cpus_for(config: Config) -> Collection[int]:
    """Return the hardware threads to bind the process to; none to leave it unbound."""
    cpus = config.affinity.cpus if isinstance(config, WorkerConfig) else ()
    return awake_cpus(cpus or usable_cpus()) if stays_awake(config) else cpus


def _imported(name: str) -> Callable[..., None]:
    """Import ``module:function``. The collector is off during imports, whose objects stay alive: it would take a fifth
    of their time. It never looks at them later, either: a pass over those of PyTorch takes 0.1 s."""
    module, _, function = name.partition(":")
    gc.disable()
    imported: Callable[..., None] = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    return imported


def run(order: Order, status: StatusPipe, start_life_line: Callable[[], None], *, can_fork: bool = False) -> int:
    """Import and run the order's entry; returns the exit status. ``start_life_line`` starts the first thread."""
    try:
        config = config_of(order)
        is_bound = bind_process(cpus_for(config))  # before anything counts the cores, or touches memory
        if not is_bound and stays_awake(config):
            raise ConfigError(f"{order.name} can't stay on some of the cores; go without --keep-cores-awake")
        if order.forks and can_fork:
            _imported(order.forks)(config)
        start_life_line()
        if order.early:
            _imported(order.early)(config)
        entry: Entry = _imported(order.entry)
        entry(config, status.report)
    except SplitserveError as error:
        status.report("error", {"message": str(error)})
        return 2
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        _log.exception("%s ends with an unexpected error", order.name)
        status.report("error", {"message": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def remove_shared_memory(order: Order) -> None:
    if order.shared_memory:
        shutil.rmtree(order.shared_memory, ignore_errors=True)


def _end_with_parent(life_line: FileIO, order: Order) -> None:
    """Wait for the parent's end, then ask this process to end in order, and make sure that it does."""
    life_line.read()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(ORPHAN_GRACE_SECONDS)
    remove_shared_memory(order)
    os._exit(1)


def main(status_fd: int | None = None, listener_fd: int = -1) -> int:
    """Follow the order on standard input. ``status_fd``: the status pipe of a child of a fork server; ``listener_fd``:
    its listening socket, if it gets one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to end in order
    # A child of one of Ray's actors has it blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Allows writing to a terminal of which another group is in the foreground.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    # Sent if this process is stopped when the parent ends; the life line reports that end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Unbuffered: a daemon thread that holds a buffered reader's lock makes the interpreter abort when it ends.
    life_line = FileIO(sys.stdin.fileno(), closefd=False)
    order = msgspec.json.decode(life_line.readline(), type=Order)
    if status_fd is not None:
        order = msgspec.structs.replace(order, listener_fd=listener_fd)
    set_up_logging(order.name, order.log_level)
    # The thread that started this process waits for its end. Platforms other than Linux have the life line alone.
    ask_for_death_signal(signal.SIGINT)
    watch = threading.Thread(target=_end_with_parent, args=(life_line, order), name="life-line", daemon=True)
    pipe = StatusPipe(order.status_fd if status_fd is None else status_fd)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        hold_folder(order.shared_memory)
        status = run(order, pipe, watch.start, can_fork=status_fd is not None)
    except KeyboardInterrupt:  # before run() could begin
        status = 0
    finally:
        remove_shared_memory(order)
    if order.kind == "worker":  # all that matters is closed; GPU libraries take seconds to end
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
