"""Waiting for what other processes and threads do. Not a test module."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 200.0
"""For all that is waited for: a bound on tests that fail, no figure of merit. A quiet machine takes little of it."""

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.02, 0.25
PAUSE_SHARE = 0.1
"""Pause between two looks at a condition as a share of the time waited so far: many looks take time of those that are
waited for, such as a router that is asked for its metrics."""


def wait_until(
    condition: Callable[[], object], what: object = "it didn't come true", seconds: float = PATIENCE_SECONDS
) -> None:
    """Fails after ``seconds``, saying ``what`` was waited for; if that is a function, it is asked then."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > seconds:
            raise AssertionError(f"waited {seconds:g} s in vain: {what() if callable(what) else what}")
        time.sleep(min(max(FIRST_PAUSE_SECONDS, PAUSE_SHARE * waited), LAST_PAUSE_SECONDS))
