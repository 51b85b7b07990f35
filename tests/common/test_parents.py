"""The end of a process with its parent."""

import os
import signal
import subprocess
import sys

import pytest

from splitserve.common.parents import ask_for_death_signal
from waiting import PATIENCE_SECONDS

PARENT = """
import os, signal, time
from splitserve.common.parents import ask_for_death_signal
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, str(ask_for_death_signal(signal.SIGKILL)).encode())
    time.sleep(3600)
print(os.read(reader, 8).decode(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_a_process_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=os.environ) as parent:
        output, _ = parent.communicate(timeout=PATIENCE_SECONDS)  # until the child has closed its end, too
    assert output == b"True\n"
    assert parent.returncode == -signal.SIGKILL


def test_another_platform_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not ask_for_death_signal(signal.SIGKILL)
