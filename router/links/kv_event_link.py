"""The subscription to one worker's KV events."""

import logging
from collections.abc import Callable

import msgspec
import zmq

from splitserve.common.errors import ConfigError
from splitserve.common.security import SocketSecurity
from splitserve.protocol.kv_event_batch import TOPIC, KVEventBatch
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.router.links.links import LoopSocket, new_socket

log = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 10_000


class KVEventLink:
    """A subscription. ``on_batch`` takes each batch of the worker and returns whether it followed the previous one; if
    not, the link requests a snapshot. Raises :class:`ConfigError` for an endpoint that can't be dialled."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        info: WorkerInfo,
        security: SocketSecurity,
        on_batch: Callable[[KVEventBatch], bool],
    ) -> None:
        self._party = info.party
        self._on_batch = on_batch
        socket = new_socket(context, zmq.SUB)
        try:
            security.protect_connecting(socket)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_BATCHES)
            socket.connect(info.kv_events_endpoint)
            socket.subscribe(TOPIC)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(
                f"KV events at {info.kv_events_endpoint!r} can't be followed: {error.strerror}"
            ) from error
        self._socket = LoopSocket(socket, self._on_frames)

    def close(self) -> None:
        self._socket.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            batch = msgspec.msgpack.decode(frames[-1], type=KVEventBatch)
        except msgspec.MsgspecError as error:
            log.warning("a batch of KV events of %s can't be read: %s", self._party, error)
            return
        is_theirs = (batch.engine_id, batch.incarnation) == (self._party.engine_id, self._party.incarnation)
        if is_theirs and not self._on_batch(batch):
            self._socket.socket.unsubscribe(TOPIC)  # the worker sends a snapshot on each new subscription
            self._socket.socket.subscribe(TOPIC)
