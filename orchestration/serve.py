"""``splitserve serve``: a cluster on this machine, until a signal."""

import sys

from splitserve import __version__
from splitserve.orchestration.cores import available_cores
from splitserve.orchestration.display import print_progress
from splitserve.orchestration.launcher import LaunchInterruptedError, LocalCluster, stop_on_signals
from splitserve.orchestration.spec import ClusterSpec, check_model_directory


def serve(spec: ClusterSpec, log_level: str, *, restart: bool = True) -> int:
    """Start, show the URL, serve; returns the exit status. Raises :class:`SplitserveError` if the start fails.

    ``restart``: workers that end are started again.
    """
    check_model_directory(spec.model.path)
    num_cores = available_cores()
    cluster = LocalCluster(spec, show=print_progress, log_level=log_level, num_cores=num_cores, restart=restart)
    print(f"splitserve {__version__}: {spec.served_model_name} on {spec.describe()}, {num_cores} cores", flush=True)
    try:
        with stop_on_signals(cluster), cluster:
            print(f"Ready: {cluster.url}/v1 (model {spec.served_model_name}). Ctrl-C ends it.", flush=True)
            return cluster.watch()
    except LaunchInterruptedError as error:
        print(f"Stopped: {error}", file=sys.stderr)
        return 1
