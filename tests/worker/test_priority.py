"""Priority of a worker's process: lower on a CPU, unchanged on a GPU."""

import subprocess
import sys

import pytest

from splitserve.worker.machine.threads import NICE_LEVELS_ON_CPU


@pytest.mark.parametrize(("device", "levels"), [("cpu", NICE_LEVELS_ON_CPU), ("cuda", 0)])
def test_a_worker_gives_way_on_a_cpu_alone(device: str, levels: int) -> None:
    program = (
        "import os, torch; from splitserve.worker.machine.threads import give_way; before = os.nice(0); "
        f"give_way(torch.device('{device}')); print(min(before + {levels}, 19) == os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
