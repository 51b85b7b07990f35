"""Errors of a cluster's start."""

from splitserve.common.errors import SplitserveError


class LaunchError(SplitserveError):
    """Failure of a process of the cluster to start; the message is the process's own."""


class LaunchInterruptedError(SplitserveError):
    """End of the start before the cluster was ready, because a signal asked for it."""
