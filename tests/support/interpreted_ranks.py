"""Ranks as processes that run kernels under Triton's interpreter, over memory that they share."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PARENT = """
import os, signal, sys, traceback

import torch
import splitserve.kernels.triton.operations  # which starts no thread: ranks are forked from what it takes to import
from quick_interpreter import make_quick

make_quick()
script, path, size, *arguments = sys.argv[1:]
code, pids = compile(script, "rank", "exec"), []
for rank in range(int(size)):
    pid, status = os.fork(), 1
    if not pid:
        try:
            sys.argv[1:] = path, str(rank), size, *arguments
            exec(code, {"__name__": "rank"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()  # until the test can send them signals
worst = 0
while pids:
    pid, status = os.wait()
    pids.remove(pid)
    worst = max(worst, status)
    for other in pids if status else ():  # they would wait for it
        os.kill(other, signal.SIGKILL)
os._exit(worst > 0)
"""


def freeze_at_random(parent: "subprocess.Popen[str]", ranks: list[int]) -> None:
    """Until all have ended, or one has failed: so that each rank is late at each place now and then. ``ranks``:
    descriptors of the processes."""
    chosen = random.Random(1)
    while parent.poll() is None:
        rank = chosen.choice(ranks)
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(rank, signal.SIGSTOP)
            time.sleep(chosen.choice([0.002, 0.01, 0.02]))  # all this time the other ranks spin
            signal.pidfd_send_signal(rank, signal.SIGCONT)
        time.sleep(chosen.choice([0.0, 0.002, 0.01]))


def run_ranks(script: str, size: int, folder: Path, *arguments: int) -> None:
    """``script`` as so many processes, each told a file for shared memory, its rank, the number of ranks and
    ``arguments``; held up at random. Each has to come to its end."""
    path = folder / "shared"
    path.write_bytes(bytes((size + 1) * (1 << 16)))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ranks: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARENT, script, str(path), str(size), *map(str, arguments)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        try:
            assert parent.stdout is not None and parent.stdin is not None and parent.stderr is not None
            ranks += [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
            parent.stdin.close()
            if ranks:
                freeze_at_random(parent, ranks)
            errors = parent.stderr.read()
            assert parent.wait() == 0 and len(ranks) == size, errors
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                os.close(rank)
            parent.kill()
