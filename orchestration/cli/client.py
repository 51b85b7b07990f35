"""Clients of a running cluster for the commands: requests, logs, and the cluster's end."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.common.processes import has_ended, processes_with
from splitserve.orchestration.cli.serve import FOLDER_VARIABLE
from splitserve.orchestration.cluster.roster import WorkerPhase
from splitserve.orchestration.control.requests import AnyReply, AnyRequest, ClusterStatus, GetStatus, Stop, accepted
from splitserve.orchestration.control.socket import ask
from splitserve.orchestration.control.state_folder import StateFolder
from splitserve.orchestration.hosts.log_files import read_log
from splitserve.orchestration.hosts.shared_memory import remove_abandoned

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0  # freeing large host tiers is slow
PATIENCE_SECONDS = 10.0  # then a worker that no machine has room for is reported
ORPHAN_SECONDS = 6.0  # orphans end by themselves within half of that

Say = Callable[[str], None]


class OperationError(SplitserveError):
    """An operation that the cluster accepted and that failed later."""


class ClusterClient(Protocol):
    """Client of one cluster. Methods raise :class:`ConfigError` if the cluster can't be reached."""

    def ask(self, request: AnyRequest) -> AnyReply: ...

    def down(self, say: Say, *, forget: bool = False) -> None:
        """End the cluster, whether or not its launcher lives; no process or file of it is left when this returns.

        ``forget``: at least remove this machine's record of it if the Ray cluster that it runs on can't be reached.
        """

    def bring_code(self) -> None:
        """Make processes that start from now on run the code of this command."""

    def log_names(self) -> list[str]:
        """Return the names of the processes that have a log."""

    def read_log(self, name: str, num_lines: int, offset: int) -> tuple[str, int]:
        """Read a process's log; see :func:`splitserve.orchestration.hosts.log_files.read_log`."""

    def is_alive(self) -> bool: ...


class LocalClient:
    """Client of a cluster on this machine, which is found by its state folder."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder

    def ask(self, request: AnyRequest) -> AnyReply:
        if not self._folder.is_claimed():
            name = self._folder.name
            raise ConfigError(
                f"cluster {name} doesn't run any more: `splitserve logs --name {name}` may show why, and `splitserve "
                f"down --name {name}` removes what is left of it"
            )
        return ask(self._folder.socket, request)

    def down(self, say: Say, *, forget: bool = False) -> None:
        del forget
        if self._folder.is_claimed():
            self._stop_launcher()
            say(f"{self._folder.name}: all processes have ended")
        else:
            say(f"{self._folder.name}: its launcher is gone; removing what it has left")
        for process in self._wait_for_orphans():
            say(f"  pid {process.pid} was left over: killed")
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(STOP_SECONDS)
        remove_abandoned()
        self._folder.remove()

    def bring_code(self) -> None:
        """Do nothing: processes on this machine always run the code that is installed here."""

    def log_names(self) -> list[str]:
        names = sorted(path.stem for path in self._folder.logs.glob("*.log"))
        if not names:
            raise ConfigError(f"cluster {self._folder.name} logs to the terminal that it was started from")
        return names

    def read_log(self, name: str, num_lines: int, offset: int) -> tuple[str, int]:
        return read_log(self._folder.logs / f"{name}.log", num_lines, offset)

    def is_alive(self) -> bool:
        return self._folder.is_claimed()

    def _stop_launcher(self) -> None:
        """End the launcher, which ends its cluster; its process is gone when this returns, not its claim alone."""
        record = self._folder.read_if_readable()
        launcher = None
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(record.launcher_pid) if record is not None and record.launcher_pid else None
            if launcher is not None:
                launcher.send_signal(signal.SIGCONT)  # a stopped one would neither answer nor end
        try:
            accepted(self.ask(Stop()))
        except SplitserveError:  # the launcher doesn't listen (any more); a signal asks for the same
            if launcher is not None:
                with suppress(psutil.NoSuchProcess):
                    launcher.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        while self._folder.is_claimed() or (launcher is not None and not has_ended(launcher)):
            if time.monotonic() > deadline:
                raise OperationError(
                    f"cluster {self._folder.name} doesn't end; its launcher is process "
                    f"{record.launcher_pid if record else 'unknown'}: end that one, then run this command again"
                )
            time.sleep(0.05)

    def _wait_for_orphans(self) -> list[psutil.Process]:
        """Wait as long as orphans need to end by themselves; return the processes of the cluster that still run."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := processes_of(self._folder.path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return running processes that belong to the cluster with this folder, whichever process started them."""
    return processes_with(FOLDER_VARIABLE, str(folder))


# ---- operations, followed to their end ----


def status_of(client: ClusterClient) -> ClusterStatus:
    reply = client.ask(GetStatus())
    accepted(reply)
    assert isinstance(reply, ClusterStatus)
    return reply


def follow(
    client: ClusterClient,
    say: Say,
    is_over: Callable[[ClusterStatus], bool],
    wanted: int,
    timeout_seconds: float = float("inf"),
    *,
    since: ClusterStatus | None = None,
) -> ClusterStatus:
    """Print changes of the workers until ``is_over``, and workers that no machine has had room for for a while.

    ``wanted``: number of workers that the cluster should have. ``since``: status from which on changes are shown; None
    takes the first one that is asked for here, which a quick worker may precede. Raises :class:`OperationError` if a
    worker was abandoned meanwhile, or after ``timeout_seconds``.
    """
    shown = {} if since is None else {worker.name: worker.phase for worker in since.workers}
    words: dict[str, str] = {}
    began = time.monotonic()
    placeless: dict[str, float] = {}  # worker -> since when, or infinity once it was reported
    while True:
        status = status_of(client)
        now = time.monotonic()
        phases = {worker.name: worker.phase for worker in status.workers}
        for worker in status.workers:
            name, phase = worker.name, worker.phase
            if shown.get(name, phase) != phase or (name not in shown and shown):
                why = f": {worker.last_words}" if phase is WorkerPhase.WAITING and worker.last_words else ""
                say(f"  {name:<10} {phase}{why}")
        for name in shown.keys() - phases.keys():
            say(f"  {name:<10} gone")
        shown = phases
        words |= {worker.name: worker.last_words for worker in status.workers if worker.last_words}
        if is_over(status):
            return status
        if sum(status.counts.values()) < wanted:
            reasons = "; ".join(words.values()) or "splitserve logs may show why"
            raise OperationError(f"a worker could not be started and was abandoned: {reasons}")
        if now - began > timeout_seconds:
            raise OperationError(f"it took longer than {timeout_seconds:g} s: {_unfinished(status)}")
        for worker in status.workers:
            if worker.phase is not WorkerPhase.STARTING or worker.pid:
                placeless.pop(worker.name, None)
            elif now - placeless.setdefault(worker.name, now) > PATIENCE_SECONDS:
                say(f"  {worker.name:<10} still {worker.runs_on}")
                placeless[worker.name] = float("inf")
        time.sleep(POLL_SECONDS)


def _unfinished(status: ClusterStatus) -> str:
    states = [f"{worker.name} {worker.phase} ({worker.runs_on or 'nowhere yet'})" for worker in status.workers]
    upgrade = f"; upgrade {status.upgrade.state}" if status.upgrade is not None else ""
    return f"the cluster is {status.state}, wanted {status.counts}, there are {', '.join(states) or 'none'}{upgrade}"


def log_lines(client: ClusterClient, name: str, num_lines: int, *, follow: bool) -> Iterator[str]:
    """Yield lines that the process called ``name`` ("": each process) has logged, prefixed with the process's name.

    Raises :class:`ConfigError` for a name that has no log.
    """
    names = client.log_names()
    if name and name not in names:
        raise ConfigError(f"there is no log of {name!r}; there are {', '.join(names)}")
    offsets = dict.fromkeys([name] if name else names, -1)
    while True:
        for each in offsets:
            text, offsets[each] = client.read_log(each, num_lines, offsets[each])
            yield from (f"{each}: {line}" for line in text.splitlines())
        if not follow or not client.is_alive():
            return
        time.sleep(POLL_SECONDS)
        offsets = {each: 0 for each in client.log_names() if not name} | offsets
