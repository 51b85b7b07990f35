"""Access of one thread to an LMCache server: its connection, and a session for each copy."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.lmcache.block_bytes import block_bytes_of
from splitserve.kvconnector.lmcache.chunk import Bytes
from splitserve.kvconnector.lmcache.connection import Connection, LMCacheError
from splitserve.kvconnector.lmcache.link import REQUEST_SECONDS, Epoch, LMCacheLink
from splitserve.kvconnector.lmcache.wire import Key, Operation, Slot
from splitserve.kvconnector.tiers.copies import ToldError
from splitserve.kvconnector.tiers.shared import ChainCopy


class Session:
    """One copy, as the server sees it."""

    def __init__(self, connection: Connection, epoch: Epoch, copy: ChainCopy, request_id: str) -> None:
        self._connection = connection
        self._epoch = epoch
        self._copy = copy
        self.request_id = request_id
        self.locked: Key | None = None
        """Key of chunks that a lookup has locked for this session, until they are retrieved or unlocked."""

    def call(self, operation: Operation, *arguments: Any, kind: Any = None) -> Any:
        return self._connection.call(operation, *arguments, kind=kind, seconds=REQUEST_SECONDS)

    def key(self, start: int, end: int, *, worker_id: int | None = 0) -> Key:
        """Return the key of chunks ``start`` to ``end``."""
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
        """Return the chunk's bytes in shared memory. Raises :class:`LMCacheError` for an impossible location."""
        pool, num_bytes = self._epoch.pool, self._epoch.chunks.num_bytes
        if slot.length != num_bytes or slot.offset < 0 or slot.offset + num_bytes > len(pool):
            raise LMCacheError(
                f"it assigned {slot.length} bytes at offset {slot.offset} to a chunk of {num_bytes} bytes"
            )
        return pool[slot.offset : slot.offset + num_bytes]


class Lane:
    """One thread's connection, replaced in each epoch, and its access to the blocks."""

    def __init__(self, link: LMCacheLink, memory: KVMemory) -> None:
        self.blocks = block_bytes_of(memory)
        self._link = link
        self._epoch: Epoch | None = None
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def session(self, copy: ChainCopy, epoch: Epoch) -> Iterator[Session]:
        """Open a session for a copy, and end it in any case.

        After an error the server's state of the session is unknown: the epoch ends, and with it all that the server
        held for this worker.
        """
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
        except BaseException as error:  # this worker's copy failed: the server may hold space or locks for it
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
