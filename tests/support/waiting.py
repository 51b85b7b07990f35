"""Waiting for what other processes and threads do. Not a test module."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
"""For all that is waited for: a bound on tests that fail, no figure of merit. A quiet machine takes little of it."""


def wait_until(
    condition: Callable[[], object], what: object = "it didn't come true", seconds: float = PATIENCE_SECONDS
) -> None:
    """Fails after ``seconds``, saying ``what`` was waited for; if that is a function, it is asked then."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain: {what() if callable(what) else what}")
        time.sleep(0.02)
