"""A cluster of processes on this machine: the router first, then all workers at once.

:class:`LocalCluster` starts them, shows their progress, watches them and ends them. It is one loop over the
children's events (see :mod:`.process`). A worker that ends is started again (see :mod:`.restarts`): same name, new
incarnation. No child outlives the cluster: they are asked with SIGINT, which doesn't wait for requests, killed after
:data:`STOP_GRACE_SECONDS`, and end by themselves if this process dies without a word.
"""

import http.client
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from urllib.parse import urlsplit

from splitserve.config import WorkerConfig
from splitserve.errors import SplitserveError
from splitserve.orchestration.addresses import LOOPBACK, own_address
from splitserve.orchestration.child import Config
from splitserve.orchestration.cores import available_cores, split_cores
from splitserve.orchestration.expansion import (
    Secrets,
    resolve_secrets,
    router_config,
    worker_config,
    worker_environment,
    worker_names,
)
from splitserve.orchestration.gpus import VISIBLE, Gpu, GpuAssignment, check_enough_gpus, device_of, list_gpus
from splitserve.orchestration.process import ChildExited, ChildProcess, ChildProgress, Event, StopRequested
from splitserve.orchestration.restarts import RestartPolicy
from splitserve.orchestration.spec import ClusterSpec
from splitserve.security import check_exposure

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

    Start it from a thread that outlives it; in the main thread the kernel guards against orphans, too. Workers are
    started again while :meth:`watch` runs, unless ``restart`` is off. ``environment`` is added to the children's own.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        show: Callable[[ChildProgress], None] = ignore_progress,
        log_level: str = "info",
        entries: Entries = Entries(),
        num_cores: int | None = None,
        restart: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.url = ""
        self._membership = ""
        self._num_cores = available_cores() if num_cores is None else num_cores
        self._show = show
        self._log_level = log_level
        self._entries = entries
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._restart = restart
        self._environment = environment
        self._changed = threading.Condition()  # guards what watch() changes and others look at
        self._children: dict[str, ChildProcess] = {}
        self._ready_since: dict[str, float] = {}
        self._leaving: set[str] = set()  # were told to end
        self._worker_configs: dict[str, WorkerConfig] = {}
        self._worker_environments: dict[str, dict[str, str]] = {}
        self._gpus: dict[str, list[Gpu]] = {}
        self._policies: dict[str, RestartPolicy] = {}
        self._restart_due_at: dict[str, float] = {}
        self._chosen = random.Random()

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
        with self._changed:
            return {name: child.pid for name, child in self._children.items()}

    @property
    def ready(self) -> frozenset[str]:
        """Workers that said that they are ready, and have neither ended nor been sent away since."""
        with self._changed:
            return frozenset(self._ready_since.keys() - self._leaving)

    def wait_ready(self, name: str, timeout_seconds: float) -> bool:
        """Wait until a worker is ready; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: name in self.ready, timeout_seconds)

    def send_signal(self, name: str, signal_number: int) -> None:
        """To a process that is running; nothing if it has just ended. Raises :class:`KeyError` for an unknown name."""
        with self._changed:
            self._children[name].send_signal(signal_number)
            if signal_number in (signal.SIGTERM, signal.SIGKILL):
                self._leaving.add(name)

    def restart(self, name: str) -> None:
        """Ask a worker to drain; :meth:`watch` starts it again when it has ended."""
        self.send_signal(name, signal.SIGTERM)

    def start(self) -> None:
        """Return when every worker is ready and the router says so; on any failure everything is stopped.

        Raises :class:`LaunchError`, or :class:`LaunchInterruptedError` after :meth:`request_stop`.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            secrets = resolve_secrets(self.spec)
            host = own_address(self.spec.network, LOOPBACK)
            check_exposure(host, secrets.secret)
            self._assign_gpus()
            self._spawn("router", self._entries.router, router_config(self.spec, secrets, host), threads=0)
            self._handle_events_until(lambda: self._membership != "", "the router's membership endpoint", deadline)
            self._plan_workers(secrets, host)
            for name in self._worker_configs:
                self._spawn_worker(name)
            self._handle_events_until(lambda: self._all_ready() and self.url != "", "all workers", deadline)
            self._wait_until_router_ready(time.monotonic() + ROUTER_READY_TIMEOUT_SECONDS)
        except BaseException:
            self.stop()
            raise

    def watch(self) -> int:
        """Serve until :meth:`request_stop`; returns the exit status: 1 if the router died or no worker is left."""
        while True:
            match self._next_event():
                case StopRequested(reason):
                    _log.info("%s: stopping", reason)
                    return 0
                case ChildExited(name, returncode):
                    self._on_exit(name, returncode)
                    if name == "router":
                        _log.error("the router is gone: stopping")
                        return 1
                    if len(self._children) == 1 and not self._restart_due_at:
                        _log.error("no worker is left: stopping")
                        return 1
                case ChildProgress() as progress:
                    self._note_progress(progress)
            self._start_due_workers()

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """:meth:`watch` in a thread of its own, for a caller with something else to do.

        Raises :class:`LaunchError` at the end if the cluster had ended by itself.
        """
        statuses: list[int] = []
        watcher = threading.Thread(target=lambda: statuses.append(self.watch()), name="watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self.request_stop("the supervision's end")
            watcher.join()
        if statuses != [0]:
            raise LaunchError("the cluster ended by itself: its log says why")

    def request_stop(self, reason: str) -> None:
        """Make :meth:`start` or :meth:`watch` return; safe in a signal handler and from any thread."""
        self._events.put(StopRequested(reason))

    def stop(self) -> None:
        """End every child within :data:`STOP_GRACE_SECONDS`, by force if need be. Idempotent."""
        for child in self._children.values():
            child.interrupt()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        for child in self._children.values():
            if not child.join(max(0.0, deadline - time.monotonic())):
                _log.warning("%s (pid %d) did not end within %g s: killed", child.name, child.pid, STOP_GRACE_SECONDS)
                child.kill()
                child.join(STOP_GRACE_SECONDS)
        with self._changed:
            self._children.clear()
            self._ready_since.clear()
            self._leaving.clear()
            self._restart_due_at.clear()

    def _assign_gpus(self) -> None:
        gpus = list_gpus({**os.environ, **(self._environment or {})})
        check_enough_gpus(self.spec, gpus)
        assignment = GpuAssignment(gpus, self.spec.devices.share)
        for name, pool in worker_names(self.spec).items():
            if device_of(pool.device, gpus) == "cuda":
                self._gpus[name] = assignment.take(name, pool.tensor_parallel_size)

    def _plan_workers(self, secrets: Secrets, host: str) -> None:
        """The workers' configs; cores are split between those whose pools don't say how many threads they have."""
        pools = worker_names(self.spec)
        shares = dict(zip(pools, split_cores(self._num_cores, len(pools)), strict=True))
        for name, pool in pools.items():
            self._worker_configs[name] = worker_config(
                self.spec,
                pool,
                name,
                secrets,
                membership=self._membership,
                host=host,
                threads=pool.threads or shares[name],
            )
            self._worker_environments[name] = worker_environment(self.spec, pool)
            if name in self._gpus:
                self._worker_environments[name][VISIBLE] = ",".join(gpu.uuid for gpu in self._gpus[name])
            self._policies[name] = RestartPolicy()

    def _spawn_worker(self, name: str) -> None:
        config = self._worker_configs[name]
        self._spawn(name, self._entries.worker, config, config.engine.threads)

    def _spawn(self, name: str, entry: str, config: Config, threads: int) -> None:
        child = ChildProcess(
            name=name,
            entry=entry,
            config=config,
            threads=threads,
            log_level=self._log_level,
            events=self._events,
            environment={**self._worker_environments.get(name, {}), **(self._environment or {})},
        )
        with self._changed:
            self._children[name] = child

    def _next_event(self) -> Event | None:
        """The next event; None when a worker is due to be started before one comes."""
        due_at = min(self._restart_due_at.values(), default=None)
        try:
            return self._events.get(timeout=None if due_at is None else max(0.0, due_at - time.monotonic()))
        except Empty:
            return None

    def _on_exit(self, name: str, returncode: int) -> None:
        """Take note of a child's end, and decide whether and when it is started again."""
        now = time.monotonic()
        with self._changed:
            child = self._children.pop(name)
            ready_since = self._ready_since.pop(name, None)
            self._leaving.discard(name)
        child.join(STOP_GRACE_SECONDS)
        _log.log(logging.ERROR if returncode else logging.INFO, "%s", child.describe_exit(returncode))
        if name == "router":
            return
        delay_seconds: float | None = None
        if self._restart:
            seconds_ready = None if ready_since is None else now - ready_since
            policy = self._policies[name]
            delay_seconds = policy.on_death(seconds_ready, self._chosen) if returncode else 0.0
        if delay_seconds is None:
            _log.error("%s is not restarted; %s go on", name, ", ".join(sorted(self._children)))
            return
        _log.warning("%s is started again%s", name, f" in {delay_seconds:.1f} s" if delay_seconds else "")
        self._restart_due_at[name] = now + delay_seconds

    def _start_due_workers(self) -> None:
        now = time.monotonic()
        for name in [name for name, due_at in self._restart_due_at.items() if due_at <= now]:
            del self._restart_due_at[name]
            try:
                self._spawn_worker(name)
            except OSError as error:  # no memory, no process: as if it had died at once
                delay_seconds = self._policies[name].on_death(None, self._chosen)
                _log.error("%s can't be started: %s", name, error)
                if delay_seconds is not None:
                    self._restart_due_at[name] = now + delay_seconds

    def _all_ready(self) -> bool:
        return self._ready_since.keys() >= self._children.keys() - {"router"}

    def _handle_events_until(self, condition: Callable[[], bool], awaited: str, deadline: float) -> None:
        while not condition():
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                missing = ", ".join(sorted(self._children.keys() - self._ready_since.keys() - {"router"})) or "router"
                raise LaunchError(f"gave up waiting for {awaited}; not ready: {missing}") from None
            self._handle_start_event(event)

    def _handle_start_event(self, event: Event) -> None:
        match event:
            case StopRequested(signal_name):
                raise LaunchInterruptedError(f"{signal_name} before the cluster was ready")
            case ChildExited(name, returncode):
                child = self._children[name]
                raise LaunchError(f"{name}: {child.describe_exit(returncode)}")
            case ChildProgress(_, stage, detail):
                if stage == "membership":
                    self._membership = detail["endpoint"]
                elif stage == "listening":
                    self.url = detail["url"]
                self._note_progress(event)

    def _note_progress(self, progress: ChildProgress) -> None:
        if progress.stage == "ready":
            with self._changed:
                self._ready_since[progress.name] = time.monotonic()
                self._changed.notify_all()
        self._show(progress)

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
