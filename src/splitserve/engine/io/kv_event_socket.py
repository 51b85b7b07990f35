"""Publishes the blocks that a worker holds, as they change: docs/guides/kv-events.md.

A subscriber first gets a snapshot, then the changes. Batches are numbered; a subscriber that misses one subscribes
anew.
"""

import logging
from typing import Protocol

import msgspec
import zmq

from splitserve.engine.block_manager import BlockManager
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.protocol.kv_event_batch import TOPIC, KVEvent, KVEventBatch

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_SECONDS = 0.5
"""A storm of subscribers shares snapshots: one costs time in proportion to all that is held."""


class PublishesKVEvents(Protocol):
    @property
    def endpoint(self) -> str: ...

    def publish(self, blocks: BlockManager, now: float) -> None: ...

    def next_deadline(self) -> float:
        """Return when :meth:`publish` has something to do, if nothing happens before."""


class NoKVEvents:
    """Publishes nothing."""

    endpoint = ""

    def publish(self, blocks: BlockManager, now: float) -> None:
        del blocks, now

    def next_deadline(self) -> float:
        return float("inf")


class KVEventSocket:
    """The publisher of KV events, called by the engine loop in each of its rounds. A subscriber that is too slow misses
    batches; the worker never waits for it."""

    def __init__(self, sockets: WorkerSockets) -> None:
        self._me = sockets.me
        self._socket, self.endpoint = sockets.bind_publisher()
        self._number = 0
        self._snapshot_is_wanted = False
        self._next_snapshot_at = 0.0
        logger.info("KV events at %s", self.endpoint)

    def publish(self, blocks: BlockManager, now: float) -> None:
        """Send the changes since the last call, and a snapshot if there is a new subscriber."""
        events = blocks.tiers.events.take()
        if events:
            self._number += 1
            self._send(blocks, events, is_snapshot=False)
        self._snapshot_is_wanted |= self._has_new_subscriber()
        if self._snapshot_is_wanted and now >= self._next_snapshot_at:
            self._snapshot_is_wanted = False
            self._next_snapshot_at = now + SNAPSHOT_INTERVAL_SECONDS
            self._send(blocks, blocks.contents(), is_snapshot=True)

    def next_deadline(self) -> float:
        return self._next_snapshot_at if self._snapshot_is_wanted else float("inf")

    def _has_new_subscriber(self) -> bool:
        """Return whether a subscriber arrived since the last call."""

        found = False
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found |= message[:1] == b"\x01"

    def _send(self, blocks: BlockManager, events: list[KVEvent], *, is_snapshot: bool) -> None:
        me = self._me
        batch = KVEventBatch(
            engine_id=me.engine_id,
            incarnation=me.incarnation,
            number=self._number,
            block_size=blocks.block_size,
            root_hash=blocks.root_hash,
            is_snapshot=is_snapshot,
            events=events,
        )
        self._socket.send_multipart([TOPIC, msgspec.msgpack.encode(batch)], zmq.NOBLOCK)
