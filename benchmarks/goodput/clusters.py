"""Clusters of the arms: one for each probe, or one for all probes of an arm beside those of the others."""

import contextlib
from collections.abc import Iterator
from http import HTTPStatus

from splitserve.benchmarks.goodput.arms import Arm
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

RESET_SECONDS = 30.0


class Clusters:
    """Clusters that stay up, by arm, until the context's end.

    ``side_by_side`` False: none stays up. A cluster that is used again begins with empty prefix caches. While one is
    measured the others are idle, on the same devices.
    """

    def __init__(self, *, side_by_side: bool) -> None:
        self._side_by_side = side_by_side
        self._stack = contextlib.ExitStack()
        self._running: dict[str, LocalCluster] = {}

    def __enter__(self) -> "Clusters":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._running.clear()
        self._stack.close()

    @contextlib.contextmanager
    def running(self, arm: Arm, spec: ClusterSpec) -> Iterator[LocalCluster]:
        """Yield the arm's cluster, ready. Raises :class:`SplitserveError` if it doesn't start."""
        if not self._side_by_side:
            with LocalCluster(spec, log_level="warning") as cluster:
                yield cluster
            return
        if arm.name in self._running:
            reset_prefix_caches(self._running[arm.name].url)
        else:
            self._running[arm.name] = self._stack.enter_context(LocalCluster(spec, log_level="warning"))
        yield self._running[arm.name]


def reset_prefix_caches(url: str) -> None:
    """Empty the prefix caches of the workers behind a router. Raises :class:`SplitserveError` if it doesn't do that."""
    answer = Endpoint(url).post("/admin/reset-prefix-cache", {}, RESET_SECONDS)
    if answer.status != HTTPStatus.OK:
        raise SplitserveError(f"{url} did not reset its prefix caches: {answer.words()}")
