"""``splitserve`` as a user runs it. Not a test module."""

import subprocess
import sys

PATIENCE_SECONDS = 200.0  # of commands that start a cluster; a quiet machine takes a small part of it


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "splitserve.orchestration.cli.main", *arguments]


def splitserve(*arguments: str, status: int = 0) -> str:
    """Run a command that is to end with ``status``; what it printed, and what it complained of."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
