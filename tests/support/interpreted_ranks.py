"""Ranks as processes that run kernels under Triton's interpreter, over memory that they share."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_QUICKLY = """
from quick_interpreter import make_quick
make_quick()
"""


def freeze_at_random(ranks: list["subprocess.Popen[str]"]) -> None:
    """Until all have ended, or one has failed: so that each rank is late at each place now and then."""
    chosen = random.Random(1)
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        rank = chosen.choice(ranks)
        rank.send_signal(signal.SIGSTOP)
        time.sleep(chosen.choice([0.002, 0.01, 0.02]))  # all this time the other ranks spin
        rank.send_signal(signal.SIGCONT)
        time.sleep(chosen.choice([0.0, 0.002, 0.01]))


def run_ranks(script: str, size: int, folder: Path, *arguments: int) -> None:
    """``script`` as so many processes, each told a file for shared memory, its rank, the number of ranks and
    ``arguments``; held up at random. Each has to print "right"."""
    path = folder / "shared"
    path.write_bytes(bytes((size + 1) * (1 << 16)))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-W", "ignore", "-c", _QUICKLY + script, str(path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *map(str, arguments)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        freeze_at_random(ranks)
        for rank in sorted(ranks, key=lambda rank: rank.poll() in (None, 0)):
            out, err = rank.communicate(timeout=60)
            assert out == "right\n", err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
