"""A cluster of processes on this machine: the router first, then all workers at once.

:class:`LocalCluster` starts them, shows their progress, watches them and ends them. It is one loop over the
children's events (see :mod:`.process`); nothing is restarted. No child outlives it: they are asked with
SIGTERM, killed after :data:`STOP_GRACE_SECONDS`, and end by themselves if this process dies without a word.
"""

import http.client
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from urllib.parse import urlsplit

from splitserve.config import WorkerConfig
from splitserve.errors import SplitserveError
from splitserve.orchestration.child import Config
from splitserve.orchestration.cores import available_cores
from splitserve.orchestration.process import ChildExited, ChildProcess, ChildProgress, Event, StopRequested
from splitserve.orchestration.spec import ClusterSpec

STOP_GRACE_SECONDS = 3.0
START_TIMEOUT_SECONDS = 900.0
ROUTER_READY_TIMEOUT_SECONDS = 30.0
_READY_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


class LaunchError(SplitserveError):
    """A process of the cluster failed to start; the message is its own."""


class LaunchInterruptedError(SplitserveError):
    """A signal asked for the end before the cluster was ready."""


@dataclass(frozen=True)
class Entries:
    """What the processes run, as ``module:function`` (see :class:`splitserve.orchestration.child.Order`)."""

    router: str = "splitserve.router.server:run_router"
    worker: str = "splitserve.decode.entry:run_worker"


def ignore_progress(_event: ChildProgress) -> None:
    """For callers that show nothing."""


class LocalCluster:
    """Use as a context manager (ready inside, gone after), or ``start``, ``watch``, ``stop``.

    Start it from a thread that outlives it; in the main thread the kernel guards against orphans, too.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        show: Callable[[ChildProgress], None] = ignore_progress,
        log_level: str = "info",
        entries: Entries = Entries(),
        num_cores: int | None = None,
    ) -> None:
        self.spec = spec
        self.url = ""
        self._membership = ""
        self._num_cores = available_cores() if num_cores is None else num_cores
        self._show = show
        self._log_level = log_level
        self._entries = entries
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children: dict[str, ChildProcess] = {}
        self._ready: set[str] = set()

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name (``router``, ``prefill-0``, ...)."""
        return {name: child.pid for name, child in self._children.items()}

    def start(self) -> None:
        """Return when every worker is ready and the router says so; on any failure everything is stopped.

        Raises :class:`LaunchError`, or :class:`LaunchInterruptedError` after :meth:`request_stop`.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            self._spawn("router", self._entries.router, self.spec.router_config(), threads=0)
            self._handle_events_until(lambda: self._membership != "", "the router's membership endpoint", deadline)
            for config in self.spec.worker_configs(self._membership, self._num_cores):
                self._spawn_worker(config)
            self._handle_events_until(lambda: self._all_ready() and self.url != "", "all workers", deadline)
            self._wait_until_router_ready(time.monotonic() + ROUTER_READY_TIMEOUT_SECONDS)
        except BaseException:
            self.stop()
            raise

    def watch(self) -> int:
        """Serve until :meth:`request_stop`; returns the exit status: 1 if the router or the last worker died."""
        while True:
            match self._events.get():
                case StopRequested(signal_name):
                    _log.info("%s: stopping", signal_name)
                    return 0
                case ChildExited(name, returncode):
                    child = self._children.pop(name)
                    child.join(STOP_GRACE_SECONDS)
                    _log.error("%s", child.describe_exit(returncode))
                    if name == "router":
                        _log.error("the router is gone: stopping")
                        return 1
                    if len(self._children) == 1:
                        _log.error("no worker is left: stopping")
                        return 1
                    _log.error("%s is not restarted; %s go on", name, ", ".join(sorted(self._children)))
                case ChildProgress() as progress:
                    self._show(progress)

    def request_stop(self, reason: str) -> None:
        """Make :meth:`start` or :meth:`watch` return; safe in a signal handler and from any thread."""
        self._events.put(StopRequested(reason))

    def stop(self) -> None:
        """End every child within :data:`STOP_GRACE_SECONDS`, by force if need be. Idempotent."""
        for child in self._children.values():
            child.terminate()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        for child in self._children.values():
            if not child.join(max(0.0, deadline - time.monotonic())):
                _log.warning("%s (pid %d) did not end within %g s: killed", child.name, child.pid, STOP_GRACE_SECONDS)
                child.kill()
                child.join(STOP_GRACE_SECONDS)
        self._children.clear()

    def _spawn_worker(self, config: WorkerConfig) -> None:
        self._spawn(config.engine_id, self._entries.worker, config, config.engine.threads)

    def _spawn(self, name: str, entry: str, config: Config, threads: int) -> None:
        self._children[name] = ChildProcess(
            name=name,
            entry=entry,
            config=config,
            threads=threads,
            log_level=self._log_level,
            events=self._events,
        )

    def _all_ready(self) -> bool:
        return self._ready >= self._children.keys() - {"router"}

    def _handle_events_until(self, condition: Callable[[], bool], awaited: str, deadline: float) -> None:
        while not condition():
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                missing = ", ".join(sorted(self._children.keys() - self._ready - {"router"})) or "router"
                raise LaunchError(f"gave up waiting for {awaited}; not ready: {missing}") from None
            self._handle_start_event(event)

    def _handle_start_event(self, event: Event) -> None:
        match event:
            case StopRequested(signal_name):
                raise LaunchInterruptedError(f"{signal_name} before the cluster was ready")
            case ChildExited(name, returncode):
                child = self._children[name]
                raise LaunchError(f"{name}: {child.describe_exit(returncode)}")
            case ChildProgress(name, stage, detail):
                if stage == "membership":
                    self._membership = detail["endpoint"]
                elif stage == "listening":
                    self.url = detail["url"]
                elif stage == "ready":
                    self._ready.add(name)
                self._show(event)

    def _wait_until_router_ready(self, deadline: float) -> None:
        answer = "no answer"
        while time.monotonic() < deadline:
            ready, answer = probe_ready(self.url)
            if ready:
                return
            try:
                self._handle_start_event(self._events.get(timeout=_READY_POLL_SECONDS))
            except Empty:
                continue
        raise LaunchError(f"all workers are ready, but the router is not: GET {self.url}/ready gives {answer}")


def probe_ready(url: str) -> tuple[bool, str]:
    """Whether GET ``url``/ready gives 200, and what it gave. Goes past any proxy of the environment."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=5.0)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return (
            response.status == http.HTTPStatus.OK,
            f"{response.status} {response.read(500).decode(errors='replace')}",
        )
    except (OSError, http.client.HTTPException) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


@contextmanager
def stop_on_signals(cluster: LocalCluster) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP (unless ignored, as by ``nohup``) ask the cluster to stop. For the main thread."""

    def handle(number: int, _frame: FrameType | None) -> None:
        cluster.request_stop(signal.Signals(number).name)

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
