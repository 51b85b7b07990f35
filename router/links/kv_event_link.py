"""The subscription to one worker's KV events."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import zmq

from splitserve.common.errors import ConfigError
from splitserve.common.security import SocketSecurity
from splitserve.protocol.kv_event_batch import TOPIC, KVEventBatch
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.router.links.links import LoopSocket, new_socket

log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 10_000
MAX_BATCH_BYTES = 256 * 1024 * 1024  # a snapshot of 14 million blocks
MAX_BLOCKS_PER_TURN = 1024
SNAPSHOT_PATIENCE_SECONDS = 5.0
"""Time after which a snapshot that was requested counts as lost: a queue between the two was full. It doubles with each
request, since a large snapshot takes long."""
MAX_SNAPSHOT_PATIENCE_SECONDS = 60.0


class KVEventLink:
    """A subscription. ``on_batch`` takes each batch of the worker in its turn and returns its parts, which yield their
    numbers of blocks, or None if an earlier batch is missing: the link then requests a snapshot, until one arrives. The
    parts are applied in turns of the event loop, so that a large batch doesn't hold it up. Raises :class:`ConfigError`
    for an endpoint that can't be dialled, or if no socket can be opened."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        info: WorkerInfo,
        security: SocketSecurity,
        on_batch: Callable[[KVEventBatch], Iterator[int] | None],
    ) -> None:
        self._party = info.party
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._next_turn: asyncio.Handle | None = None  # set while parts are left
        self._batches: deque[KVEventBatch] = deque()
        self._parts: Iterator[int] = iter(())  # of the batch before them
        try:
            socket = self._subscribed(context, info.kv_events_endpoint, security)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events at {info.kv_events_endpoint!r} can't be followed: {error.strerror}"
            ) from error
        self._socket = LoopSocket(socket, self._on_frames)
        self._patience_seconds = SNAPSHOT_PATIENCE_SECONDS
        self._next_request: asyncio.TimerHandle | None = self._request_later()  # unless a snapshot has come by then

    @staticmethod
    def _subscribed(
        context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, security: SocketSecurity
    ) -> "zmq.Socket[bytes]":
        socket = new_socket(context, zmq.SUB)
        try:
            security.protect_connecting(socket)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_BATCHES)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.connect(endpoint)
            socket.subscribe(TOPIC)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def close(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._snapshot_is_here()
        self._socket.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            batch = msgspec.msgpack.decode(frames[-1], type=KVEventBatch)
        except msgspec.MsgspecError as error:
            log.warning("a batch of KV events of %s can't be read: %s", self._party, error)
            return
        if (batch.engine_id, batch.incarnation) != (self._party.engine_id, self._party.incarnation):
            return
        if len(self._batches) >= MAX_QUEUED_BATCHES:
            self._batches.clear()  # the snapshot says what they say
            self._request_snapshot()
            return
        if batch.is_snapshot:
            self._snapshot_is_here()
        self._batches.append(batch)
        if self._next_turn is None:
            self._apply()

    def _snapshot_is_here(self) -> None:
        if self._next_request is not None:
            self._next_request.cancel()
        self._next_request, self._patience_seconds = None, SNAPSHOT_PATIENCE_SECONDS

    def _request_snapshot(self) -> None:
        """Subscribe anew: the worker then sends a snapshot."""
        self._socket.socket.unsubscribe(TOPIC)
        self._socket.socket.subscribe(TOPIC)
        self._socket.catch_up()
        if self._next_request is not None:
            self._next_request.cancel()
        self._next_request = self._request_later()

    def _request_later(self) -> asyncio.TimerHandle:
        seconds = self._patience_seconds
        self._patience_seconds = min(2 * seconds, MAX_SNAPSHOT_PATIENCE_SECONDS)
        return self._loop.call_later(seconds, self._request_snapshot)

    def _apply(self) -> None:
        """Apply parts of the batches that have arrived, the rest in later turns of the loop."""
        self._next_turn, num_blocks = None, 0
        while num_blocks < MAX_BLOCKS_PER_TURN:
            part = next(self._parts, None)
            if part is not None:
                num_blocks += part
            elif self._batches:
                self._begin(self._batches.popleft())
            else:
                return
        self._next_turn = self._loop.call_soon(self._apply)

    def _begin(self, batch: KVEventBatch) -> None:
        parts = self._on_batch(batch)
        if parts is None:
            self._request_snapshot()
        self._parts = parts or iter(())
