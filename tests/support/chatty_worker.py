"""A worker that only logs. Not a test module."""

import logging
import time
from collections.abc import Callable

from splitserve.protocol.config import WorkerConfig

NUM_LINES = 2000


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    for number in range(NUM_LINES):
        logging.getLogger("chatty").info("line %d", number)
        time.sleep(0.0005)
    progress("ready", {})
