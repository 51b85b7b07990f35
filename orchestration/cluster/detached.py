"""A cluster without a terminal: ``splitserve up`` starts this module as a process of its own, and follows its start.

Contract: the first line of standard input is an :class:`Order` as JSON; the status pipe carries
:class:`splitserve.orchestration.hosts.child.Progress` as JSON lines up to stage ``serving``, or ``error`` with the
reason.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.orchestration.cli.serve import run_cluster
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launcher import LaunchError, LaunchInterruptedError, LocalCluster
from splitserve.orchestration.control.state_folder import NameTakenError, StateFolder
from splitserve.orchestration.hosts.child import StatusPipe
from splitserve.orchestration.hosts.log_files import keep_short, open_log
from splitserve.orchestration.hosts.process import progress_of
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.conversion import convert_spec

_PROCESS = "process"  # key of the process's name in a detail; details have a "name" of their own


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to the detached launcher: the cluster to run, and its state folder."""

    spec: dict[str, object]
    folder: str
    status_fd: int
    log_level: str
    restart: bool


def start_detached(
    spec: ClusterSpec, folder: StateFolder, log_level: str, *, restart: bool, show: Callable[[ChildProgress], None]
) -> str:
    """Start a cluster that outlives this process; returns its URL once it answers.

    If interrupted, it ends the cluster. Raises :class:`LaunchError` with the cluster's own message if the start fails.
    """
    if folder.is_claimed():
        raise NameTakenError(folder.name)
    with _launcher_log(folder) as log:
        read_fd, write_fd = os.pipe()
        order = Order(
            spec=msgspec.to_builtins(spec),
            folder=str(folder.path),
            status_fd=write_fd,
            log_level=log_level,
            restart=restart,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "splitserve.orchestration.cluster.detached"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    os.close(write_fd)
    assert process.stdin is not None
    # A process that has ended already gives the reason on its pipe or in its log.
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
    try:
        return _follow(read_fd, show, folder.logs)
    except BaseException:
        process.terminate()  # while it starts up it may ignore SIGINT, as a shell's background jobs do
        process.wait()
        raise


@contextmanager
def _launcher_log(folder: StateFolder) -> Iterator[IO[bytes] | None]:
    """Open the launcher's log. Raises :class:`ConfigError` if it can't be created."""
    with ExitStack() as stack:
        try:
            folder.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = stack.enter_context(open_log(folder.logs / "launcher.log"))
        except OSError as error:
            raise folder.refusal(error) from error
        yield log


def _follow(read_fd: int, show: Callable[[ChildProgress], None], logs: Path) -> str:
    with os.fdopen(read_fd, "rb") as status:
        for progress in progress_of(status):
            if progress.stage == "serving":
                return progress.detail["url"]
            if progress.stage == "error":
                raise LaunchError(progress.detail["message"])
            process = progress.detail.pop(_PROCESS)
            show(ChildProgress(process, progress.stage, progress.detail))
    raise LaunchError(f"the launcher ended without giving a reason (logs: {logs})")


def _pass_on(status: StatusPipe, progress: ChildProgress) -> None:
    """Report a child's progress to the process that follows the start."""
    if progress.stage != "error":  # an error ends the start and is reported then
        status.report(progress.stage, {**progress.detail, _PROCESS: progress.name})


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    status = StatusPipe(order.status_fd)
    set_up_logging("launcher", order.log_level)

    def announce(cluster: LocalCluster) -> None:
        status.report("serving", {"url": cluster.url})
        status.close()

    path = Path(order.folder)
    folder = StateFolder(path.name, path.parent)
    try:
        folder.claim()
        keep_short(folder.logs / "launcher.log", threading.Event())  # for the life of this process
        exit_status = run_cluster(
            convert_spec(order.spec),
            folder,
            order.log_level,
            restart=order.restart,
            show=partial(_pass_on, status),
            announce=announce,
            log_folder=folder.logs,
        )
    except LaunchInterruptedError as error:
        folder.remove()
        status.report("error", {"message": str(error)})
        return 1
    except SplitserveError as error:
        folder.discard()
        status.report("error", {"message": f"{error} (logs: {folder.logs})"})
        return 2
    except KeyboardInterrupt:
        folder.remove()
        return 1
    if exit_status == 0:  # otherwise it ended by itself, and its logs give the reason
        folder.remove()
    return exit_status


if __name__ == "__main__":
    sys.exit(main())
