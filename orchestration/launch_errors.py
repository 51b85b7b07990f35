"""Errors of a cluster's start."""

from splitserve.errors import SplitserveError


class LaunchError(SplitserveError):
    """A process of the cluster failed to start; the message is its own."""


class LaunchInterruptedError(SplitserveError):
    """A signal asked for the end before the cluster was ready."""
