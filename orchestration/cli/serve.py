"""Life of a cluster on this machine: in the foreground (``splitserve serve``) or detached (``up``)."""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from splitserve import __version__
from splitserve.common.cores import available_cores
from splitserve.common.errors import ConfigError
from splitserve.common.logs import HOLD_VARIABLE
from splitserve.orchestration.cli.display import GREEN, coloured, print_progress
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launcher import LaunchInterruptedError, LocalCluster, stop_on_signals
from splitserve.orchestration.control.socket import ControlServer
from splitserve.orchestration.control.state_folder import NameTakenError, Record, StateFolder
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

FOLDER_VARIABLE = "SPLITSERVE_CLUSTER_FOLDER"  # in the environment of every process of a cluster

_log = logging.getLogger(__name__)


def serve(spec: ClusterSpec, log_level: str, *, restart: bool = True, verbose: bool = False) -> int:
    """Start a cluster, show its URL, serve until a signal; returns the exit status.

    ``restart``: start workers again that end. ``verbose``: show the processes' logs of the start, too, not only its
    progress. Raises :class:`SplitserveError` if the start fails.
    """
    with tempfile.TemporaryDirectory(prefix="splitserve-") as scratch:
        held = Path(scratch) / "log-is-held"
        if not verbose:
            held.touch()
            os.environ[HOLD_VARIABLE] = str(held)
        try:
            return _serve(spec, log_level, held, restart=restart)
        finally:
            os.environ.pop(HOLD_VARIABLE, None)


def _serve(spec: ClusterSpec, log_level: str, held: Path, *, restart: bool) -> int:
    """Serve; the processes' logs are held back until the cluster is ready, while ``held`` is there."""
    folder = _claim_any(spec.name)

    def announce(cluster: LocalCluster) -> None:
        ready = coloured("Ready:", GREEN)
        print(f"{ready} {cluster.url}/v1 (model {spec.served_model_name}). Ctrl-C ends it.", flush=True)
        held.unlink(missing_ok=True)

    print(
        f"splitserve {__version__}: {spec.served_model_name} on {spec.describe()}, {available_cores()} cores",
        flush=True,
    )
    try:
        return run_cluster(spec, folder, log_level, restart=restart, show=print_progress, announce=announce)
    except LaunchInterruptedError as error:
        print(f"Stopped: {error}", file=sys.stderr)
        return 1
    finally:
        if folder is not None:
            folder.remove()


def run_cluster(
    spec: ClusterSpec,
    folder: StateFolder | None,
    log_level: str,
    *,
    restart: bool,
    show: Callable[[ChildProgress], None],
    announce: Callable[[LocalCluster], None],
    log_folder: Path | None = None,
) -> int:
    """Serve until a signal or a request to stop; returns the exit status.

    ``folder`` must be claimed; the control socket is created in it. ``announce`` is called when the cluster is ready.
    Raises :class:`SplitserveError` if the start fails.
    """
    if folder is not None:
        spec = msgspec.structs.replace(spec, name=folder.name)
    environment = {} if folder is None else {FOLDER_VARIABLE: str(folder.path)}
    cluster = LocalCluster(
        spec, show=show, log_level=log_level, restart=restart, environment=environment, log_folder=log_folder
    )
    with stop_on_signals(cluster), _controlled(cluster, folder), cluster:
        announce(cluster)
        return cluster.watch()


@contextmanager
def _controlled(cluster: LocalCluster, folder: StateFolder | None) -> Iterator[None]:
    """Serve the requests of the commands on the control socket of ``folder``, if there is one."""
    if folder is None:
        yield
        return
    folder.write(Record(name=folder.name, launcher_pid=os.getpid()))
    server = ControlServer(folder.socket, cluster.ask)
    try:
        yield
    finally:
        server.close()


def _claim_any(name: str) -> StateFolder | None:
    """Claim a state folder of that name, or of a similar name if that one is taken.

    Returns None if no folder can be claimed: the cluster serves all the same.
    """
    try:
        for candidate in (name, f"{name}-{os.getpid()}"):
            folder = StateFolder(candidate)
            try:
                folder.claim()
            except NameTakenError:
                continue
            return folder
    except ConfigError as error:
        _log.warning("%s; `splitserve status` and its like won't find this cluster", error)
    return None
