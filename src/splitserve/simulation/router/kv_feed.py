"""KV events from a simulated worker to the router's prefix view: late, sometimes lost, repaired by a snapshot, which
may be lost as well."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitserve.protocol.kv_event_batch import KVEvent, KVEventBatch

if TYPE_CHECKING:
    from splitserve.simulation.router.driver import SimRouter
    from splitserve.simulation.worker.driver import SimWorker

MAX_DELAY_SECONDS = 0.1
SNAPSHOT_PATIENCE_SECONDS = 5.0
"""Time after which a snapshot counts as lost."""


class SimKVFeed:
    """One worker's publisher, and the router's subscription to it."""

    def __init__(self, router: "SimRouter", worker: "SimWorker") -> None:
        self._router = router
        self._worker = worker
        self._number = 0
        self._is_subscribed = False
        self._busy_until = 0.0
        self._num_snapshots = 0  # that have arrived

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send events to the subscriber."""
        if events:
            self._number += 1
            self._send(events, is_snapshot=False)

    def subscribe(self) -> None:
        """Ask for a snapshot, which arrives after a while; later changes follow it. Ask again if it is lost."""
        self._is_subscribed = True
        sim, before = self._router.sim, self._num_snapshots
        sim.after(sim.random.uniform(0.0, MAX_DELAY_SECONDS), self._send_snapshot)
        sim.after(SNAPSHOT_PATIENCE_SECONDS, lambda: self._subscribe_again(before))

    def _subscribe_again(self, before: int) -> None:
        is_lost = self._is_subscribed and self._num_snapshots == before
        if is_lost and self._worker.alive and self._router.is_linked(self._worker.party):
            self.subscribe()

    def _send_snapshot(self) -> None:
        if self._worker.alive:
            self._send(self._worker.core.state.blocks.contents(), is_snapshot=True)

    def _send(self, events: Sequence[KVEvent], *, is_snapshot: bool) -> None:
        sim, party, blocks = self._router.sim, self._worker.party, self._worker.core.state.blocks
        is_lost = sim.faults.drop > 0 and sim.random.random() < sim.faults.drop
        if not self._is_subscribed or is_lost:
            return
        batch = KVEventBatch(
            engine_id=party.engine_id,
            incarnation=party.incarnation,
            number=self._number,
            block_size=blocks.block_size,
            root_hash=blocks.root_hash,
            is_snapshot=is_snapshot,
            events=list(events),
        )
        arrival = max(self._busy_until, sim.now + sim.random.uniform(0.0, MAX_DELAY_SECONDS))
        self._busy_until = arrival
        sim.at(arrival, lambda: self._arrive(batch))

    def _arrive(self, batch: KVEventBatch) -> None:
        self._num_snapshots += batch.is_snapshot
        if not self._router.is_linked(self._worker.party):
            self._is_subscribed = False
        elif not self._router.prefixes.apply(batch):
            self.subscribe()
