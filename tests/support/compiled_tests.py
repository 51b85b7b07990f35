"""Test modules compiled by one process of pytest-xdist, from which the others have them. Not a test module."""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@contextmanager
def compiled_once(config: pytest.Config) -> Iterator[None]:
    """Collect tests within: on a clean clone, the first process of pytest-xdist does so before the others.

    Else each would rewrite the assertions of every module, which takes longer than all imports.
    """
    if not hasattr(config, "workerinput") or sys.dont_write_bytecode:
        yield
        return
    folder = TESTS / "__pycache__"
    folder.mkdir(exist_ok=True)
    with (folder / "collecting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if are_compiled(TESTS):
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield


def are_compiled(folder: Path) -> bool:
    """Return whether pytest has compiled most test modules under ``folder`` before, be it another version of them."""
    modules = len(list(folder.rglob("test_*.py")))
    return len(list(folder.rglob("__pycache__/test_*-pytest-*.pyc"))) > modules // 2
