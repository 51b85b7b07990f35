"""A time after which a run of tests begins no more of them, for machines that are too slow for all. Not a test module.

``SPLITSERVE_TEST_MINUTES=N`` asks for it. A test that would begin more than N minutes after the run did is skipped; the
last lines and the file ``v/splitserve/not_begun`` of pytest's cache say how many those were.
"""

import math
import os
import time
from typing import Any

import pytest

VARIABLE = "SPLITSERVE_TEST_MINUTES"
REASON = f"not begun in the time of {VARIABLE}"
NUMBER = "splitserve/not_begun"


class TimeLimit:
    """The plugin of pytest, in the process that shares tests out, and in each of pytest-xdist's that runs them.

    ``began`` and ``end`` are in seconds of ``time.monotonic``, which is one clock for all processes of a machine.
    """

    def __init__(self, config: pytest.Config) -> None:
        given = os.environ.get(VARIABLE) or "inf"
        try:
            minutes = float(given)
        except ValueError:
            minutes = math.nan
        if not minutes >= 0:
            raise pytest.UsageError(f"{VARIABLE} is {given!r}: expected a number of minutes")
        self.began: float = getattr(config, "workerinput", {}).get("began", time.monotonic())
        self.end = self.began + 60 * minutes

    def is_over(self, share: float) -> bool:
        """Return whether this share of the time is over."""
        return time.monotonic() > self.began + share * (self.end - self.began)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist asks for it before it starts a process."""
        node.workerinput["began"] = self.began

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() >= self.end:
            pytest.skip(REASON)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        number = sum(REASON in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
        if getattr(config, "cache", None) is not None:  # absent with -p no:cacheprovider
            config.cache.set(NUMBER, number)
        if number:
            terminalreporter.section("not begun")
            terminalreporter.write_line(f"{number} tests were {REASON} ({os.environ[VARIABLE]})")
