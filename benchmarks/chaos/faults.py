"""Faults for the chaos bench: kills, freezes and drains of random workers, never of the last one of a pool."""

import asyncio
import datetime
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from splitserve.orchestration.cluster.launcher import LocalCluster

POLL_SECONDS = 0.1


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL
    FREEZE = "freeze"  # SIGSTOP for longer than a lease, then SIGCONT
    DRAIN = "drain"  # SIGTERM


@dataclass(slots=True)
class Fault:
    """Fault injected into one worker."""

    kind: FaultKind
    worker: str
    at: float  # on the client's monotonic clock
    seconds: float = 0.0  # duration of a freeze
    wall_time: str = field(default_factory=lambda: f"{datetime.datetime.now():%H:%M:%S.%f}"[:-3])  # as in the logs

    @property
    def role(self) -> str:
        return self.worker.rpartition("-")[0]


class FaultInjector:
    """Injector of faults. ``ready_workers`` returns the workers to which the router sends requests."""

    def __init__(
        self,
        cluster: LocalCluster,
        ready_workers: Callable[[], Awaitable[set[str]]],
        *,
        kinds: Sequence[FaultKind],
        freeze_seconds: float,
        pause_seconds: float,
        seed: int,
        before_fault: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._ready_workers = ready_workers
        self._kinds = kinds
        self._freeze_seconds = freeze_seconds
        self._pause_seconds = pause_seconds
        self._chosen = random.Random(seed)
        self._before_fault = before_fault
        self._frozen: dict[str, int] = {}  # name: pid
        self._thaws: set[asyncio.Task[None]] = set()
        self.faults: list[Fault] = []

    async def run_until(self, end: float) -> None:
        """Inject faults one after another, each as soon as every pool has another ready worker, with pauses between
        them."""
        while True:
            victim = await self._next_victim(end)
            if victim is None:
                return
            self._before_fault()
            self._inject(Fault(self._chosen.choice(self._kinds), victim, time.monotonic()))
            await asyncio.sleep(self._chosen.uniform(0.5, 1.5) * self._pause_seconds)

    async def finish(self) -> None:
        """Wait until all frozen workers run again."""
        if self._thaws:
            await asyncio.gather(*self._thaws)

    def thaw_all(self) -> None:
        """Resume all frozen workers, for an early end of the bench."""
        for name in list(self._frozen):
            self._wake(name)

    async def _next_victim(self, end: float) -> str | None:
        while time.monotonic() < end:
            usable = await self._usable_workers()
            roles = [name.rpartition("-")[0] for name in usable]
            candidates = [name for name, role in zip(usable, roles, strict=True) if roles.count(role) > 1]
            if candidates:
                return self._chosen.choice(candidates)
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _usable_workers(self) -> list[str]:
        by_router = await self._ready_workers()
        return sorted((by_router & self._cluster.ready) - self._frozen.keys())

    def _inject(self, fault: Fault) -> None:
        self.faults.append(fault)
        match fault.kind:
            case FaultKind.KILL:
                self._cluster.send_signal(fault.worker, signal.SIGKILL)
            case FaultKind.DRAIN:
                self._cluster.restart(fault.worker)
            case FaultKind.FREEZE:
                self._frozen[fault.worker] = self._cluster.pids[fault.worker]
                self._cluster.send_signal(fault.worker, signal.SIGSTOP)
                task = asyncio.create_task(self._thaw(fault))
                self._thaws.add(task)
                task.add_done_callback(self._thaws.discard)
        fault.at = time.monotonic()

    async def _thaw(self, fault: Fault) -> None:
        await asyncio.sleep(self._freeze_seconds * self._chosen.uniform(1.0, 1.2))
        fault.seconds = time.monotonic() - fault.at
        self._wake(fault.worker)

    def _wake(self, name: str) -> None:
        try:
            # The child isn't reaped, so its process id is still its own.
            os.kill(self._frozen.pop(name), signal.SIGCONT)
        except (KeyError, ProcessLookupError):
            return
