"""A worker whose clock is wrong: ahead on prefill workers, behind on all others. Not a test module."""

import time
from collections.abc import Callable

from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.request import Role

SHIFT_SECONDS = 0.05


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    """Run a worker with such a clock."""
    ahead, right = SHIFT_SECONDS if config.role is Role.PREFILL else -SHIFT_SECONDS, time.monotonic
    time.monotonic = lambda: right() + ahead
    from splitserve.worker.entry import run_worker

    run_worker(config, progress)
