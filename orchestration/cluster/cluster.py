"""A cluster of processes: the router first, then all workers as soon as membership's endpoint is known.

:class:`Cluster` starts them, shows their progress, watches them and ends them, wherever its host runs them
(:mod:`splitserve.orchestration.hosts.local`, :mod:`splitserve.orchestration.ray.host`). It is one loop over events;
:mod:`.supervision` decides which workers there should be. No child outlives a cluster on this machine: the cluster ends
its children with SIGINT, which doesn't wait for requests, and kills them after :data:`.children.STOP_GRACE_SECONDS`
(more with large host tiers); if this process is killed, they end by themselves.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import (
    Asked,
    Child,
    ChildExited,
    ChildProgress,
    Event,
    Host,
    Memory,
    StopRequested,
)
from splitserve.orchestration.cluster.launch_errors import LaunchError, LaunchInterruptedError
from splitserve.orchestration.cluster.roster import Action, WorkerPhase
from splitserve.orchestration.cluster.router_keeper import Routers
from splitserve.orchestration.cluster.start import ClusterStart
from splitserve.orchestration.cluster.supervision import Supervisor
from splitserve.orchestration.cluster.worker_keeper import WorkerKeeper
from splitserve.orchestration.control.requests import (
    Accepted,
    AnyReply,
    AnyRequest,
    DrainWorker,
    GetStatus,
    Refused,
    Scale,
    Stop,
    UpgradeCluster,
)
from splitserve.orchestration.control.status import cluster_status
from splitserve.orchestration.lmcache.keeper import LMCacheKeeper, is_lmcache
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

START_TIMEOUT_SECONDS = 900.0
ROUTER_READY_TIMEOUT_SECONDS = 60.0  # a slow machine takes long to connect workers
REPLY_TIMEOUT_SECONDS = 30.0

_log = logging.getLogger(__name__)


def ignore_progress(_event: ChildProgress) -> None:
    """Ignore progress: the default of callers that show none."""


class Cluster:
    """A running cluster: a context manager (ready inside, gone after), or ``start``, ``watch``, ``stop``.

    Start it from a thread that outlives it; in the main thread the kernel guards against orphans, too. Workers are
    started again while :meth:`watch` runs, unless ``restart`` is off. The router's end is the cluster's, unless
    ``restart_router`` is on.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        host: Host,
        *,
        show: Callable[[ChildProgress], None] = ignore_progress,
        restart: bool = True,
        restart_router: bool = False,
    ) -> None:
        self.spec = spec
        self.state = "starting"
        self._host = host
        self._show = show
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children = Children(lambda: self.state == "starting")
        self._supervisor = Supervisor(spec, restart=restart, has_room=host.has_room)
        self._routers = Routers(spec, self._children, host, self._events.put, restart=restart_router)
        self._lmcache = LMCacheKeeper()
        self._workers = WorkerKeeper(
            self._supervisor, self._children, host, emit=self._events.put, on_gone=self._lmcache.leave
        )
        self._has_served = False
        self._remembered: Memory | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- from any thread ----

    @property
    def url(self) -> str:
        """URL of the endpoint; "" until the router listens."""
        return self._routers.url

    @property
    def pids(self) -> dict[str, int]:
        """Return process ids by name (``router``, ``prefill-0``, ...)."""
        return self._children.pids()

    @property
    def ready(self) -> frozenset[str]:
        """Names of workers that have reported ready and have since neither ended nor been asked to leave."""
        with self._children.changed:
            return self._supervisor.names(WorkerPhase.READY)

    def wait_ready(self, name: str, timeout_seconds: float) -> bool:
        """Wait until a worker is ready; False if that takes longer."""
        with self._children.changed:
            return self._children.changed.wait_for(
                lambda: name in self._supervisor.names(WorkerPhase.READY), timeout_seconds
            )

    def send_signal(self, name: str, signal_number: int) -> None:
        """Send a signal to a running process, none if it has just ended. Raises :class:`KeyError` for an unknown
        name."""
        with self._children.changed:
            self._children.by_name[name].send_signal(signal_number)
            if name not in self._routers and signal_number in (signal.SIGTERM, signal.SIGKILL):
                self._supervisor.on_leaving(name)

    def restart(self, name: str) -> None:
        """Ask a worker to drain; :meth:`watch` starts it again when it has ended."""
        self.send_signal(name, signal.SIGTERM)

    def request_stop(self, reason: str) -> None:
        """Make :meth:`start` or :meth:`watch` return; safe in a signal handler and from any thread."""
        self._events.put(StopRequested(reason))

    def ask(self, request: AnyRequest) -> AnyReply:
        """Have the thread that watches the cluster answer a request. Must not be called from that thread."""
        replies: SimpleQueue[AnyReply] = SimpleQueue()
        self._events.put(Asked(request, replies.put))
        try:
            return replies.get(timeout=REPLY_TIMEOUT_SECONDS)
        except Empty:
            return Refused(f"the cluster didn't answer within {REPLY_TIMEOUT_SECONDS:g} s; it may be ending")

    # ---- start, watch, stop ----

    def start(self) -> None:
        """Start all processes; returns when every worker is ready and the router reports ready. Any failure stops
        everything.

        Raises :class:`LaunchError`, or :class:`LaunchInterruptedError` after :meth:`request_stop`.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        start = self._new_start()
        try:
            self._host.prepare(self.spec)
            self._remember()  # before any process runs: another launcher takes over those that it finds
            self._routers.start()
            start.wait(lambda: self._routers.membership != "", "the router's membership endpoint", deadline)
            self._supervisor.want_all(time.monotonic())
            self._do_what_is_due()
            self._wait_for_all(start, deadline)
        except BaseException:
            self.stop()
            raise

    def come_back(self, memory: Memory, adopt: Callable[[Callable[[Event], None]], Mapping[str, Child]]) -> None:
        """Take over the cluster of a launcher that was lost, instead of :meth:`start`; if it was lost while the cluster
        started, go on with that.

        ``adopt`` returns the processes that the lost launcher has left running, by name; they repeat their progress
        from the beginning. Raises :class:`LaunchError` if no router can be started.
        """
        children = adopt(self._events.put)
        now = time.monotonic()
        with self._children.changed:
            servers = self._lmcache.adopt(children)
            self._supervisor.restore(
                memory.snapshot, {name for name in children if name not in self._routers} - servers, now
            )
            if not memory.snapshot.workers:
                self._supervisor.want_all(now)  # the launcher was lost before it had asked for any worker
        for child in children.values():
            self._children.add(child)
        self._routers.recall(memory.membership, memory.url, now)
        deadline = now + START_TIMEOUT_SECONDS
        while not self._routers.are_listening:
            self._do_what_is_due(with_workers=False)
            self._handle(self._next_event(min(deadline, self._routers.due_at)))
            if time.monotonic() > deadline:
                raise LaunchError("gave up waiting for the router")
        self._has_served = memory.has_served
        self.state = "serving" if memory.has_served else "starting"
        self._do_what_is_due()
        if not memory.has_served:
            self._wait_for_all(self._new_start(), deadline)

    def _new_start(self) -> ClusterStart:
        return ClusterStart(self._next_of_start, self._children, self._note_progress, self._reply, self._not_ready)

    def _wait_for_all(self, start: ClusterStart, deadline: float) -> None:
        """Wait until all workers are ready, and the router as well: from then on the cluster serves."""
        start.wait(lambda: not self._not_ready() and self.url != "", "all workers", deadline)
        start.wait_for_router(self.url, time.monotonic() + ROUTER_READY_TIMEOUT_SECONDS)
        self.state, self._has_served = "serving", True
        self._remember()

    def watch(self) -> int:
        """Serve until :meth:`request_stop`; returns the exit status: 1 if the router died or no worker is left."""
        while True:
            match event := self._next_event():
                case StopRequested(reason):
                    _log.info("%s: stopping", reason)
                    return 0
                case _:
                    self._handle(event)
            if self._routers.are_lost:
                _log.error("the router is gone: stopping")
                return 1
            if not self._supervisor.workers:
                _log.error("no worker is left: stopping")
                return 1
            self._do_what_is_due()

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Run :meth:`watch` in a thread of its own, for a caller that does something else meanwhile.

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
            raise LaunchError("the cluster ended by itself: see its log")

    def stop(self) -> None:
        """End every child within the time that the module's docstring names, by force if need be. Idempotent."""
        self.state = "stopping"
        workers = self._supervisor.workers.values()
        give_back_seconds = max((worker.spec.give_back_seconds() for worker in workers), default=0.0)
        self._children.end_all(give_back_seconds)
        with self._children.changed:
            self._children.by_name.clear()
            self._supervisor.workers.clear()
        self._host.close()

    # ---- workers ----

    def _do_what_is_due(self, *, with_workers: bool = True) -> None:
        now = time.monotonic()
        self._routers.start_due(now)
        if not with_workers:
            return
        self._keep_lmcache()
        self._workers.poll(self._routers.membership)
        self._remember()

    def _handle(self, event: Event | None) -> None:
        match event:
            case ChildExited(name, returncode):
                words = self._children.take_leave(name, returncode)
                if name in self._routers:
                    self._routers.on_exit(name, words, time.monotonic())
                elif is_lmcache(name):
                    self._host.release(name)
                    self._lmcache.on_exit(name, time.monotonic())
                else:
                    self._workers.on_exit(name, returncode, words)
            case ChildProgress() as progress:
                self._note_progress(progress)
            case Asked(request, answer):
                answer(self._reply(request))
            case StopRequested(reason):
                raise LaunchInterruptedError(f"{reason} before the cluster was ready")

    def _next_event(self, until: float | None = None) -> Event | None:
        """Return the next event; None when something is due (``until``, if that is given) before an event arrives."""
        due_at = self._due_at() if until is None else until
        try:
            return self._events.get(timeout=None if due_at == float("inf") else max(0.0, due_at - time.monotonic()))
        except Empty:
            return None

    def _due_at(self) -> float:
        return min(self._supervisor.next_due(), self._routers.due_at, self._lmcache.next_due())

    def _next_of_start(self, until: float) -> Event | None:
        """Do what is due, as a worker that ended while no launcher watched; see :class:`ClusterStart`."""
        self._do_what_is_due()
        return self._next_event(min(until, self._due_at()))

    def _note_progress(self, progress: ChildProgress) -> None:
        actions: list[Action] = []
        match progress.stage:
            case "ready" if progress.name in self._supervisor.workers:
                actions = self._workers.on_ready(progress.name)
            case "placed" | "started" if progress.name in self._supervisor.workers:
                self._workers.on_placed(progress.name)
            case "dismissed" if progress.name in self._supervisor.workers:
                self._workers.on_dismissed(progress.name)
            case "ready" if is_lmcache(progress.name):
                self._lmcache.on_ready(progress.name, time.monotonic())
            case "down" if is_lmcache(progress.name):
                self._lmcache.on_down(progress.name)
            case "lmcache":
                self._lmcache.use(progress.name, progress.detail["server"], time.monotonic())
                self._keep_lmcache()
            case "membership":
                self._on_membership(progress.name, progress.detail["endpoint"])
            case "listening":
                self._routers.on_listening(progress.name, progress.detail["url"], time.monotonic())
        self._show(progress)
        self._workers.perform(actions)
        self._remember()

    def _remember(self) -> None:
        """Have the host store the present state, for a launcher that takes over if this one is lost."""
        snapshot = self._supervisor.snapshot()
        memory = Memory(snapshot, self._routers.membership, self.url, self._has_served)
        if memory != self._remembered:
            self._host.remember(memory)
            snapshot = msgspec.structs.replace(snapshot, upgrade=copy(snapshot.upgrade))
            self._remembered = msgspec.structs.replace(memory, snapshot=snapshot)

    # ---- the router ----

    def _on_membership(self, router: str, endpoint: str) -> None:
        """Restart workers that register at another membership endpoint than the router's present one."""
        if not self._routers.on_membership(router, endpoint):
            return
        for name, child in list(self._children.by_name.items()):
            if name in self._supervisor.workers:
                _log.warning("membership has moved to %s: %s is started again", endpoint, name)
                child.kill()

    # ---- LMCache ----

    def _keep_lmcache(self) -> None:
        """Start and end LMCache servers as needed. Workers run without a server until it is there, and whenever it
        isn't."""
        running = self._children.by_name
        for name in self._lmcache.take_unused(running):
            _log.info("%s has no worker any more: it is ended", name)
            running[name].send_signal(signal.SIGINT)
        for name in self._lmcache.take_due(time.monotonic(), running):
            spec = self._supervisor.spec
            error = self._children.start(name, partial(self._host.start_lmcache, name, spec, self._events.put))
            if error is not None:
                self._lmcache.on_exit(name, time.monotonic())

    # ---- the start ----

    def _not_ready(self) -> list[str]:
        """Return the names of the workers and LMCache servers that aren't ready."""
        return sorted(self._supervisor.workers.keys() - self.ready) + self._lmcache.not_ready()

    # ---- requests ----

    def _reply(self, request: AnyRequest) -> AnyReply:
        """Carry out the part of a request that takes no time; return its reply."""
        try:
            match request:
                case GetStatus():
                    parts = self._routers, self._supervisor, self._lmcache
                    return cluster_status(self.state, *parts, self._children.by_name, now=time.monotonic())
                case Stop():
                    self.request_stop("splitserve down")
                case Scale() | DrainWorker() | UpgradeCluster():
                    self._workers.carry_out(request)
        except SplitserveError as error:
            return Refused(str(error))
        return Accepted()
