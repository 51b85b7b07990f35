"""Operators' acts on the running cluster, for the HTTP layer: pauses, resets of the prefix caches, drains."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.operators import BeginDrain
from splitserve.router.links.fleet import Fleet
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.events import Event, PauseMode, PauseRequests, ResetCaches, ResumeRequests
from splitserve.router.requests.operations.drains import check_drain, worker_named
from splitserve.router.requests.operations.refusal import OperationRefusedError, RefusalReason

PAUSE_SECONDS = 3.0
"""Time in which all routers should follow a pause or its end; one that is silent is forgotten sooner."""
RESET_SECONDS = 10.0
"""Time in which workers should have confirmed a reset; later confirmations count as well."""


class Operations:
    """Acts of operators, for use on the event loop. ``handle`` gives the core an event."""

    def __init__(self, core: RouterCore, fleet: Fleet, handle: Callable[[Event], None]) -> None:
        self._core = core
        self._fleet = fleet
        self._handle = handle
        self._pauses: set[asyncio.Event] = set()  # waits
        self._resets: set[asyncio.Event] = set()

    async def pause(self, mode: PauseMode) -> dict[str, Any]:
        """Pause all routers. Returns the state once they follow, or have been given the time for it."""
        await self._carry_out(PauseRequests(mode), self._pauses, PAUSE_SECONDS)
        return self.state()

    async def resume(self) -> dict[str, Any]:
        """End the pause of all routers. Returns the state as :meth:`pause` does."""
        await self._carry_out(ResumeRequests(), self._pauses, PAUSE_SECONDS)
        return self.state()

    async def _carry_out(self, act: Event, waits: set[asyncio.Event], seconds: float) -> None:
        """Give the core an act, and wait until one of ``waits`` is done, ``seconds`` at most."""
        done = asyncio.Event()
        waits.add(done)
        try:
            self._handle(act)
            async with asyncio.timeout(seconds):
                await done.wait()
        except TimeoutError:
            pass  # the answer names what is missing
        finally:
            waits.discard(done)

    def state(self) -> dict[str, Any]:
        """Return the pause as JSON. It is ``settled`` once all routers follow, nothing runs that it ends, awaits or
        freezes, and no worker is frozen that it doesn't freeze. What workers do is known from heartbeats that they
        have sent since they were told."""
        pause, peers = self._core.pause, self._core.peers
        num_running = len(self._core.requests) + peers.num_running
        linked = [record for record in self._fleet.membership.records() if record.is_linked]
        frozen = sorted(record.info.party.engine_id for record in linked if record.load.frozen)
        is_still = pause.freezes or not (pause.is_on and num_running)
        is_settled = is_still and all(pause.is_followed(record) for record in linked)
        return {
            "paused": pause.is_on,
            "mode": pause.mode,
            "seconds": time.monotonic() - pause.since if pause.is_on else None,
            "settled": is_settled and not peers.names_behind,
            "routers_pending": peers.names_behind,
            "requests_running": num_running,
            "requests_waiting": len(self._core.waiting_room) + len(self._core.gate.queue) + peers.num_waiting,
            "workers_frozen": frozen,
        }

    async def reset_prefix_caches(self) -> dict[str, Any]:
        """Reset all prefix caches. Returns the names of the workers that have confirmed, and of those that have not."""
        await self._carry_out(ResetCaches(), self._resets, RESET_SECONDS)
        pending = {party.engine_id for party in self._core.resets.unconfirmed}
        names = {record.info.party.engine_id for record in self._fleet.membership.records()}
        return {"reset": sorted(names - pending), "pending": sorted(pending)}

    def on_pause_followed(self) -> None:
        for done in self._pauses:
            done.set()

    def on_caches_reset(self) -> None:
        for done in self._resets:
            done.set()

    def drain(self, engine_id: str, *, force: bool) -> dict[str, Any]:
        """Let a worker finish its requests and leave. Raises :class:`OperationRefusedError` as :func:`check_drain`
        does, and if its link doesn't take the message."""
        membership = self._fleet.membership
        record = worker_named(membership, engine_id)
        check_drain(membership, record, force=force, is_frozen=self._core.pause.freezes)
        if record.state is not WorkerState.DRAINING:
            if not self._fleet.send(record.info.party, BeginDrain()):
                message = f"{engine_id} takes no messages now: try again"
                raise OperationRefusedError(RefusalReason.NO_WORKER, message)
            membership.drain(record.info.party)
        return {"worker": engine_id, "state": record.state, "requests_running": record.num_requests_of_all}

    def close(self) -> None:
        """End all waits: no confirmation will come."""
        self.on_pause_followed()
        self.on_caches_reset()
