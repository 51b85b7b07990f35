"""Actor that keeps a cluster on Ray: named, detached, on the node of the process that started it.

It runs the same launcher as a cluster on one machine; only its host differs. It isn't on any request's path: router and
workers continue without it. Ray restarts it when it dies, and it takes over the processes that it has left.
"""

import logging
import secrets
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec
import ray

from splitserve.common.errors import SplitserveError, WireError
from splitserve.common.logs import set_up_logging
from splitserve.orchestration.cluster.cluster import Cluster
from splitserve.orchestration.cluster.host import ChildProgress, Memory
from splitserve.orchestration.control.requests import Refused, decode_request, encode
from splitserve.orchestration.hosts.local import Entries
from splitserve.orchestration.hosts.log_files import MAX_LOG_BYTES, read_log
from splitserve.orchestration.ray.host import CALL_SECONDS, RayHost
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.orchestration.spec.expansion import ROUTER

POLL_SECONDS = 5.0
LAUNCHER = "launcher"

_log = logging.getLogger(__name__)


class ControllerOrder(msgspec.Struct, frozen=True, kw_only=True):
    spec: dict[str, object]
    log_level: str
    restart: bool
    entries: tuple[str, str, str]


class Step(msgspec.Struct, frozen=True):
    """Step of the start. The controller itself has the name "" and these stages: serving (detail: url), failed
    (message), ended."""

    name: str
    stage: str
    detail: dict[str, str]


class Controller:
    """Ray actor with threads. ``order`` is a :class:`ControllerOrder` as JSON."""

    def __init__(self, order: bytes) -> None:
        self._order = order
        given = msgspec.json.decode(order, type=ControllerOrder)
        spec = convert_spec(given.spec)
        self._log_file = _logs_folder() / f"splitserve-{spec.name}-{LAUNCHER}.log"
        set_up_logging(LAUNCHER, given.log_level)
        logging.getLogger().addHandler(_file_handler(self._log_file))
        self._life = secrets.token_hex(4)
        self._steps: list[Step] = []
        self._has_failed = False  # set before the failure is announced: no loop answers requests from then on
        self._changed = threading.Condition()
        self._host = RayHost(
            spec.name,
            ray.get_runtime_context().get_node_id(),
            log_level=given.log_level,
            entries=Entries(*given.entries),
        )
        memory = self._host.recall()
        self._cluster = Cluster(
            spec if memory is None else memory.snapshot.spec,
            self._host,
            show=self._note,
            restart=given.restart,
            restart_router=True,
        )
        self._thread = threading.Thread(target=self._run, args=(memory,), name="cluster", daemon=True)
        self._thread.start()

    def ask(self, request: bytes) -> bytes:
        """Answer a request (see :mod:`splitserve.orchestration.control.requests`)."""
        try:
            if self._has_failed or not self._thread.is_alive():
                return encode(Refused("the cluster has ended"))
            return encode(self._cluster.ask(decode_request(request)))
        except WireError as error:
            return encode(Refused(str(error)))

    def order(self) -> bytes:
        """Return the order that the controller was created with."""
        return self._order

    def steps(self, life: str, after: int) -> tuple[str, list[bytes]]:
        """Return steps from index ``after`` on, as JSON, and the name of this life of the controller; waits for a step,
        for a limited time. If ``life`` is an earlier one, whose steps are gone, ``after`` counts as 0."""
        first = after if life == self._life else 0
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) > first, POLL_SECONDS)
            return self._life, [msgspec.json.encode(step) for step in self._steps[first:]]

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def log_names(self) -> list[str]:
        return [LAUNCHER, *sorted(self._host.names())]

    def read_log(self, name: str, num_lines: int, offset: int) -> tuple[str, int]:
        """Read a process's log; see :func:`splitserve.orchestration.hosts.log_files.read_log`. Returns "" for a process
        that is gone."""
        if name == LAUNCHER:
            return read_log(self._log_file, num_lines, offset)
        child = self._host.child(name)
        if child is None:
            return "", offset
        try:
            text, end = ray.get(child.agent.read_log.remote(num_lines, offset), timeout=CALL_SECONDS)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return "", offset
        return str(text), int(end)

    # ---- on the cluster's thread ----

    def _run(self, memory: Memory | None) -> None:
        cluster = self._cluster
        try:
            if memory is None:
                cluster.start()
            else:
                known = {ROUTER, *(worker.name for worker in memory.snapshot.workers)}
                cluster.come_back(memory, lambda emit: self._host.adopt(cluster.spec, known, emit))
            self._step("", "serving", url=cluster.url)
            cluster.watch()
        except SplitserveError as error:
            _log.error("%s", error)
            self._fail(str(error))
        except Exception as error:
            _log.exception("the cluster's launcher failed")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            cluster.stop()
            self._step("", "ended")

    def _fail(self, message: str) -> None:
        self._has_failed = True
        self._step("", "failed", message=message)

    def _note(self, progress: ChildProgress) -> None:
        self._step(progress.name, progress.stage, **progress.detail)

    def _step(self, name: str, stage: str, /, **detail: str) -> None:
        with self._changed:
            self._steps.append(Step(name, stage, detail))
            self._changed.notify_all()


def _logs_folder() -> Path:
    return Path(ray._private.worker.global_worker.node.get_logs_dir_path())


def _file_handler(path: Path) -> logging.Handler:
    handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    return handler
