"""A cluster on this machine: :mod:`.cluster` with :mod:`splitserve.orchestration.hosts.local` as its host, ended by
signals."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from splitserve.orchestration.cluster.cluster import Cluster, ignore_progress
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launch_errors import LaunchError, LaunchInterruptedError
from splitserve.orchestration.cluster.router_keeper import probe_ready
from splitserve.orchestration.hosts.local import ENTRIES, Entries, LocalHost
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.hub import with_local_model

__all__ = ["Entries", "LaunchError", "LaunchInterruptedError", "LocalCluster", "probe_ready", "stop_on_signals"]


class LocalCluster(Cluster):
    """Cluster on this machine. ``environment`` is added to the children's own; see :class:`.LocalHost`.

    A model id of the Hub is downloaded where this machine's cache lacks it; raises :class:`CheckpointError`.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        show: Callable[[ChildProgress], None] = ignore_progress,
        log_level: str = "info",
        entries: Entries = ENTRIES,
        num_cores: int | None = None,
        restart: bool = True,
        environment: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
    ) -> None:
        host = LocalHost(
            log_level=log_level,
            entries=entries,
            num_cores=num_cores,
            environment=environment,
            log_folder=log_folder,
        )
        super().__init__(with_local_model(spec), host, show=show, restart=restart, restart_router=restart)


@contextmanager
def stop_on_signals(cluster: Cluster) -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP (unless ignored, as by ``nohup``) stop the cluster. For the main thread."""

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
