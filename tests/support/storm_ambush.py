"""Deaths of prefill workers whose blocks wait to be read: their decode worker stands still meanwhile. Not a test
module."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable

from splitserve.benchmarks.chaos.faults import Fault, FaultKind
from splitserve.orchestration.cluster.launcher import LocalCluster

HALT_SECONDS = 0.6  # shorter than a lease, and than the time after which a silent worker is given up


async def ambush(cluster: LocalCluster, ready: Callable[[], Awaitable[set[str]]], num_prefill: int) -> list[Fault]:
    """Stop all decode workers, kill a prefill worker after a while, and resume them. Returns the fault; none unless all
    ``num_prefill`` prefill workers and a decode worker are ready: requests would use up their attempts."""
    usable = sorted(await ready() & cluster.ready)
    sources = [name for name in usable if name.startswith("prefill")]
    halted = [cluster.pids[name] for name in usable if name.startswith("decode")]
    if len(sources) < num_prefill or not halted:
        return []
    victim = random.choice(sources)
    try:
        _signal_all(halted, signal.SIGSTOP)
        await asyncio.sleep(HALT_SECONDS)
        cluster.send_signal(victim, signal.SIGKILL)
        fault = Fault(FaultKind.KILL, victim, time.monotonic())
        await asyncio.sleep(0.1)
    finally:
        _signal_all(halted, signal.SIGCONT)
    return [fault]


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)
