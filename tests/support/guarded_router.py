"""A router whose event loop a stream watches, in processes of their own. Not a test module."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router_harness import RouterProcess
from splitserve.benchmarks.attacks.canary import Canary
from waiting import PATIENCE_SECONDS, wait_until

TOKEN_SECONDS = 0.01
_NUM_TOKENS = 100_000


@contextmanager
def paced_worker(membership: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A mixed worker in a process of its own, whose streams get a token each :data:`TOKEN_SECONDS`."""
    command = [sys.executable, "-m", "splitserve.benchmarks.router.instant_worker", "--membership", membership]
    command += ["--tokens-per-message", "1", "--token-seconds", str(TOKEN_SECONDS), "--vocab-size", "400"]
    command += ["--max-model-len", str(_NUM_TOKENS + 1000)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def guarded_router(model_dir: Path, **settings: object) -> Iterator[tuple[RouterProcess, Canary]]:
    """A router with one worker and a canary's stream through it."""
    router = RouterProcess(model_dir, **settings)
    try:
        with paced_worker(router.membership) as worker:
            wait_until(lambda: router.request("GET", "/ready")[0] == 200)
            canary = Canary(router.address, "tiny", _NUM_TOKENS, (router.process.pid, worker.pid))
            canary.start()
            assert canary.warmed_up.wait(PATIENCE_SECONDS)  # the worker makes all of its replies at first
            yield router, canary
            canary.close()
    finally:
        router.stop()
