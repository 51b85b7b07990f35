"""Workers of a running cluster: carries out the supervisor's decisions, and reports their results to it."""

import logging
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial

from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import Event, Host
from splitserve.orchestration.cluster.roster import Action, Drain, Kill, Start, Worker
from splitserve.orchestration.cluster.supervision import Supervisor
from splitserve.orchestration.control.requests import DrainWorker, Scale, UpgradeCluster

_log = logging.getLogger(__name__)


class WorkerKeeper:
    """Keeper of the workers among a cluster's processes: starts, drains and kills them. The processes' lock guards the
    supervisor as well.

    ``on_gone(name)`` is called for a worker that has ended and isn't started again.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        children: Children,
        host: Host,
        *,
        emit: Callable[[Event], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._supervisor = supervisor
        self._children = children
        self._host = host
        self._emit = emit
        self._on_gone = on_gone
        self._membership = ""  # endpoint at which workers register

    def poll(self, membership: str) -> None:
        """Carry out what is due. Workers register at the endpoint ``membership``."""
        self._membership = membership
        with self._children.changed:
            actions = self._supervisor.poll(time.monotonic())
        self.perform(actions)

    def carry_out(self, request: Scale | DrainWorker | UpgradeCluster) -> None:
        """Begin a requested operation. Raises :class:`ConfigError` if it is impossible."""
        now = time.monotonic()
        supervisor = self._supervisor
        match request:
            case Scale(pool, count):
                with self._children.changed:
                    actions = supervisor.scale(pool, count, now)
            case DrainWorker(name, force):
                with self._children.changed:
                    actions = supervisor.drain(name, now, force=force)
            case UpgradeCluster(_, allow_gap):
                target = request.target(supervisor.spec)
                with self._children.changed:
                    actions = supervisor.begin_upgrade(target, now, allow_gap=allow_gap)
        self.perform(actions)

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out the supervisor's decisions."""
        for action in actions:
            match action:
                case Start(worker):
                    self._start(worker)
                case Drain(name):
                    _log.info("%s is asked to finish its requests and leave", name)
                    self._children.by_name[name].send_signal(signal.SIGTERM)
                case Kill(name):
                    _log.warning("%s did not leave in time: killed", name)
                    self._children.by_name[name].kill()

    def _start(self, worker: Worker) -> None:
        name, spec, pool = worker.name, worker.spec, worker.pool
        launch = partial(self._host.start_worker, name, spec, pool, self._membership, self._emit)
        error = self._children.start(name, launch)
        if error is not None:  # treated like a worker that died at once
            self.on_exit(name, 1, str(error))
            return
        with self._children.changed:
            self._supervisor.on_started(name)

    # ---- what happened ----

    def on_placed(self, name: str) -> None:
        """Note that a worker's process runs."""
        with self._children.changed:
            self._supervisor.on_placed(name, time.monotonic())

    def on_ready(self, name: str) -> list[Action]:
        """Note that a worker serves; returns the actions that follow, for :meth:`perform`."""
        with self._children.changed:
            actions = self._supervisor.on_ready(name, time.monotonic())
            self._children.changed.notify_all()
        return actions

    def on_dismissed(self, name: str) -> None:
        """Note that an operator has asked a worker to leave, through the router."""
        with self._children.changed:
            self._supervisor.on_dismissed(name, time.monotonic())

    def on_exit(self, name: str, returncode: int, words: str) -> None:
        """Note that a worker has ended, or couldn't be started."""
        self._host.release(name)
        now = time.monotonic()
        with self._children.changed:
            was_wanted = self._supervisor.workers[name].wanted
            actions = self._supervisor.on_exit(name, returncode, words, now)
            worker = self._supervisor.workers.get(name)
        if worker is not None:
            delay_seconds = worker.due_at - now
            _log.warning("%s is started again%s", name, f" in {delay_seconds:.1f} s" if delay_seconds > 0 else "")
        elif was_wanted:
            _log.error("%s is not restarted; %s continue", name, ", ".join(sorted(self._children.by_name)))
        self.perform(actions)
        if worker is None:
            self._on_gone(name)
