"""Registration of a worker with its LMCache server: availability, model name, shared memory.

A separate thread looks for the server, registers, and pings it every few seconds. An :class:`Epoch` is one
registration; state of different epochs is never mixed.
"""

import hashlib
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from splitserve.kvconnector.lmcache.chunk import Bytes, ChunkFormat
from splitserve.kvconnector.lmcache.connection import Connection, LMCacheError, LMCacheLostError
from splitserve.kvconnector.lmcache.segment import fault_in, map_segment
from splitserve.kvconnector.lmcache.wire import Key, Operation, Registered, Registration
from splitserve.protocol.block_hash import shard_root
from splitserve.protocol.memory_records import LayoutRecord

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
"""Timeout of a request, longer than any response takes that needs no other server; then the server counts as lost."""
GREETING_SECONDS = 2.0
FAULT_IN_SHARE = 0.2
"""Share of the thread's time spent on mapping the server's memory into this process's page tables, until all is mapped.
"""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 30.0
"""Delays after an epoch: doubled each time, until an epoch was long. A server that returns and hangs can then rarely
delay requests."""
MAX_ABSENT_WAIT_SECONDS = 2.0
"""Longest delay while there is no server, which delays no request."""
LONG_EPOCH_SECONDS = 60.0
SETTLE_POLL_SECONDS = 0.02
MAX_LEFT = 256
_DONE = object()
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """One registration. ``pool``: the server's shared memory, uint8 ``[bytes]``; it stays mapped while a reference to
    the epoch exists."""

    instance_id: int
    chunk_tokens: int
    chunks: ChunkFormat
    pool: Bytes
    registration: Registration

    @property
    def model_name(self) -> str:
        return self.registration.model_name


def model_name_of(layout: LayoutRecord, rank: int = 0) -> str:
    """Return the name under which LMCache keeps the chunks of this rank of a worker; it covers everything that their
    bytes depend on, except token ids."""
    fields = (FORMAT_VERSION, *layout.dimensions)
    salt = "\x00".join(map(str, fields)).encode() + shard_root(layout, rank)
    readable = re.sub(r"[^A-Za-z0-9._-]", "-", Path(layout.model).name)[:48]
    return f"splitserve-{readable}-{hashlib.blake2b(salt, digest_size=16).hexdigest()}"


class _Waits:
    """Delays between attempts to connect."""

    def __init__(self) -> None:
        self._after_epoch = self._absent = FIRST_WAIT_SECONDS

    def next(self, epoch_seconds: float | None) -> float:
        """Return the delay in seconds after an epoch of ``epoch_seconds``, or, with None, after an attempt that started
        no epoch."""
        if epoch_seconds is None:
            seconds, self._absent = self._absent, min(2 * self._absent, MAX_ABSENT_WAIT_SECONDS)
            return seconds
        self._absent = FIRST_WAIT_SECONDS
        if epoch_seconds >= LONG_EPOCH_SECONDS:
            self._after_epoch = FIRST_WAIT_SECONDS
        seconds, self._after_epoch = self._after_epoch, min(2 * self._after_epoch, LONGEST_WAIT_SECONDS)
        return seconds


class LMCacheLink:
    """Connection of a worker to its LMCache server. ``tell`` is called with each epoch when it begins and with None
    when it ends; the first call reports the first attempt."""

    def __init__(self, endpoint: str, layout: LayoutRecord, block_bytes: int, rank: int = 0) -> None:
        self.endpoint = endpoint
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._layout = layout
        self._block_bytes = block_bytes
        self._root = shard_root(layout, rank)
        self._model_name = model_name_of(layout, rank)
        self._epoch: Epoch | None = None
        self._reason = "no attempt to connect was made yet"
        self._left: deque[tuple[str, Key | None]] = deque(maxlen=MAX_LEFT)
        self._clears_ordered = self._clears_done = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def open(self, tell: Callable[[Epoch | None], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(tell,), name="lmcache-link", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> Epoch:
        """The current epoch. Raises :class:`LMCacheLostError` while there is none."""
        with self._lock:
            if self._epoch is None:
                raise LMCacheLostError(self._reason)
            return self._epoch

    def fail(self, epoch: Epoch, reason: str) -> None:
        """End an epoch because the server does not respond, or responds wrongly; the thread then connects anew."""
        with self._lock:
            if self._epoch is not epoch:
                return
            self._epoch, self._reason = None, reason
        self._wake.set()

    def leave(self, request_id: str, locked: Key | None) -> None:
        """Remember a session that the server may still consider open, with its locks, to end it once the server
        responds."""
        self._left.append((request_id, locked))

    def clear(self) -> None:
        """Order the server's memory to be cleared: at once if it responds, else before the next epoch begins. The
        current epoch ends."""
        with self._lock:
            self._clears_ordered += 1
            if self._epoch is not None:
                self._epoch, self._reason = None, "its memory is to be cleared"
        self._wake.set()

    @property
    def num_clears(self) -> int:
        """Number of orders to clear that were carried out. Changed by the thread that calls ``tell``."""
        return self._clears_done

    def close(self, timeout_seconds: float = REQUEST_SECONDS) -> None:
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return  # the thread holds a socket, closed at the end of the process
        self.context.term()

    def _run(self, tell: Callable[[Epoch | None], None]) -> None:
        waits, told, was_ever = _Waits(), "", False  # the reason that was told last, of those since it worked
        while not self._is_closing:
            started = None
            try:
                with Connection(self.endpoint, self.context) as connection:
                    epoch = self._begin(connection)
                    self._settle(connection)
                    self._clear(connection)
                    logger.info("LMCache at %s %s", self.endpoint, "is back" if was_ever else _describe(epoch))
                    started, was_ever, told = time.monotonic(), True, ""
                    tell(epoch)
                    self._greet(connection, epoch)
            except (LMCacheError, OSError) as error:
                reason = str(error) or type(error).__name__
                if not (told or self._is_closing):
                    tell(None)
                if reason != told and not self._is_closing:
                    logger.warning("LMCache at %s can't be used: %s; continuing without it", self.endpoint, reason)
                told = reason
            if not self._is_closing:
                self._wake.wait(waits.next(None if started is None else time.monotonic() - started))
                self._wake.clear()

    def _settle(self, connection: Connection) -> None:
        """End the remembered sessions, now that the server knows our chunks again. A server restarted meanwhile knows
        none of them and ignores the requests.

        Raises :class:`LMCacheError`.
        """
        while self._left:
            request_id, locked = self._left.popleft()  # only once: on failure the server ends it itself, after a minute
            if locked is not None:
                deadline = time.monotonic() + REQUEST_SECONDS
                operation, kind = Operation.QUERY_PREFETCH_STATUS, int | None
                while connection.call(operation, request_id, kind=kind, seconds=REQUEST_SECONDS) is None:
                    if time.monotonic() > deadline:
                        break  # its locks expire
                    time.sleep(SETTLE_POLL_SECONDS)
                connection.call(Operation.FREE_LOOKUP_LOCKS, locked, 1, seconds=REQUEST_SECONDS)
            connection.call(Operation.END_SESSION, request_id, seconds=REQUEST_SECONDS)

    def _clear(self, connection: Connection) -> None:
        """Clear the server's memory if that is due. Raises :class:`LMCacheError`; then it is still due."""
        ordered = self._clears_ordered
        if self._clears_done < ordered:
            connection.call(Operation.CLEAR, True, seconds=REQUEST_SECONDS)
            self._clears_done = ordered  # an order that came meanwhile has ended the epoch

    def _begin(self, connection: Connection) -> Epoch:
        """Register with the server. Raises :class:`LMCacheError` or :class:`OSError`."""
        chunk_tokens = connection.call(Operation.GET_CHUNK_SIZE, kind=int, seconds=REQUEST_SECONDS)
        block_size = self._layout.block_size
        if chunk_tokens < block_size or chunk_tokens % block_size:
            raise LMCacheError(f"its chunks have {chunk_tokens} tokens, not a multiple of our blocks' {block_size}")
        chunks = ChunkFormat(self._root, chunk_tokens // block_size, self._block_bytes)
        registration = Registration(
            instance_id=secrets.randbits(62),
            model_name=self._model_name,
            hidden_dim_size=chunks.num_bytes,
            block_size=block_size,
        )
        registered = connection.call(Operation.REGISTER, registration, kind=Registered, seconds=REQUEST_SECONDS)
        if not registered.shm_name or not registered.pool_size:
            raise LMCacheError("it has no shared memory (start it with --shm-name NAME and --no-l1-use-lazy)")
        pool = map_segment(registered.shm_name, registered.pool_size)
        epoch = Epoch(registration.instance_id, chunk_tokens, chunks, pool, registration)
        with self._lock:
            self._epoch = epoch
        return epoch

    def _greet(self, connection: Connection, epoch: Epoch) -> None:
        """Ping the server until the epoch ends; then raise :class:`LMCacheError`."""
        pieces = fault_in(epoch.pool)
        try:
            while self._epoch is epoch and not self._is_closing:
                connection.call(Operation.PING, epoch.instance_id, kind=bool, seconds=REQUEST_SECONDS)
                self._pause(pieces)
                self._wake.clear()
        except LMCacheError as error:
            self.fail(epoch, str(error))
        finally:
            with self._lock:
                reason, self._epoch = self._reason, None
            self._wake.clear()
            try:  # ends what this worker left unfinished there, if the server responds
                self._clear(connection)
                if self._is_closing:
                    self._settle(connection)
                connection.call(Operation.UNREGISTER, epoch.instance_id, seconds=REQUEST_SECONDS / 4)
            except LMCacheError:
                logger.debug("LMCache at %s did not acknowledge that this worker leaves", self.endpoint)
        raise LMCacheLostError(reason)

    def _pause(self, pieces: Iterator[None]) -> None:
        """Wait until the next ping or until woken, mapping memory meanwhile. Raises :class:`LMCacheError`."""
        deadline, is_done = time.monotonic() + GREETING_SECONDS, False
        while not self._wake.is_set() and (left := deadline - time.monotonic()) > 0:
            started = time.monotonic()
            is_done = is_done or next(pieces, _DONE) is _DONE
            seconds = (time.monotonic() - started) * (1 / FAULT_IN_SHARE - 1)
            self._wake.wait(left if is_done else min(left, seconds))


def _describe(epoch: Epoch) -> str:
    return f"is there: chunks of {epoch.chunk_tokens} tokens ({epoch.chunks.num_bytes} bytes), {len(epoch.pool)} bytes"
