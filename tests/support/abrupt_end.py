"""The end of a process of pytest-xdist without that of its interpreter. Not a test module.

After the imports of all test modules, the interpreter takes seconds to look through its objects and to free them.
"""

import atexit
import os
import sys

import pytest

_workers: list[pytest.Config] = []


def end_abruptly(config: pytest.Config) -> None:
    """Let this process end so, if it is one of pytest-xdist's, whose exit status means nothing."""
    if is_of_xdist(config):
        _workers.append(config)


def is_of_xdist(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@atexit.register  # before all modules that have something to clean up, and so called after them
def _end() -> None:
    if _workers:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
