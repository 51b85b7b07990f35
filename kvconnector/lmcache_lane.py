"""A thread's way to an LMCache server: its connection, and sessions for single copies."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from splitserve.kvconnector.lmcache_block_bytes import block_bytes_of
from splitserve.kvconnector.lmcache_chunk import Bytes
from splitserve.kvconnector.lmcache_connection import Connection, LMCacheError
from splitserve.kvconnector.lmcache_link import REQUEST_SECONDS, Epoch, LMCacheLink
from splitserve.kvconnector.lmcache_wire import Key, Operation, Slot
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.shared_tier import ChainCopy
from splitserve.kvconnector.tier_copies import ToldError


class Session:
    """One copy as the server sees it."""

    def __init__(self, connection: Connection, epoch: Epoch, copy: ChainCopy, request_id: str) -> None:
        self._connection = connection
        self._epoch = epoch
        self._copy = copy
        self.request_id = request_id
        self.locked: Key | None = None
        """What a lookup holds for us, and nobody has taken or given back yet."""

    def call(self, operation: Operation, *arguments: Any, kind: Any = None) -> Any:
        return self._connection.call(operation, *arguments, kind=kind, seconds=REQUEST_SECONDS)

    def key(self, start: int, end: int, *, worker_id: int | None = 0) -> Key:
        """``start`` and ``end`` in chunks."""
        size = self._epoch.chunk_tokens
        return Key(
            model_name=self._epoch.model_name,
            token_ids=self._copy.token_ids[: end * size],
            start=start * size,
            end=end * size,
            request_id=self.request_id,
            worker_id=worker_id,
        )

    def chunk(self, slot: Slot) -> Bytes:
        """Its bytes in shared memory. Raises :class:`LMCacheError` for a place that can't be."""
        pool, num_bytes = self._epoch.pool, self._epoch.chunks.num_bytes
        if slot.length != num_bytes or slot.offset < 0 or slot.offset + num_bytes > len(pool):
            raise LMCacheError(f"it gives {slot.length} bytes at {slot.offset} for a chunk of {num_bytes}")
        return pool[slot.offset : slot.offset + num_bytes]


class Lane:
    """What one thread needs: a connection, which is made anew in each epoch, and a way to the blocks."""

    def __init__(self, link: LMCacheLink, memory: KVMemory) -> None:
        self.blocks = block_bytes_of(memory)
        self._link = link
        self._epoch: Epoch | None = None
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def session(self, copy: ChainCopy, epoch: Epoch) -> Iterator[Session]:
        """Ended in any case. After an error there is no telling what the server still thinks of us: the epoch is over,
        and what it held for us with it."""
        try:
            connection = self._connected(epoch)
            session = Session(connection, epoch, copy, f"splitserve-{epoch.instance_id:x}-{secrets.token_hex(8)}")
            try:
                yield session
            except BaseException:
                self._link.leave(session.request_id, session.locked)
                raise
            connection.call(Operation.END_SESSION, session.request_id, seconds=REQUEST_SECONDS)
        except LMCacheError as error:
            self._link.fail(epoch, str(error))
            self.close()
            raise ToldError(0, str(error)) from error
        except BaseException as error:  # a copy of ours failed: the server may hold room for it, or locks
            self._link.fail(epoch, f"{type(error).__name__}: {error}")
            raise

    def _connected(self, epoch: Epoch) -> Connection:
        if self._epoch is not epoch:
            self.close()
            self._connection, self._epoch = Connection(self._link.endpoint, self._link.context), epoch
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._epoch = None
