"""LMCache's multiprocess server as a tier, through its token-based operations and its shared memory.

Each copy is a session of its own, ended however the copy ends: the server then holds nothing for it any more, whatever
happens to the request. Its copies run on threads of :mod:`splitserve.kvconnector.tiers.copies`;
:class:`.link.LMCacheLink` tracks the server's availability.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from splitserve.common.errors import ConfigError
from splitserve.common.lmcache import endpoint_problem
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.lmcache.chunk import Bytes, ChunkFormat
from splitserve.kvconnector.lmcache.connection import LMCacheError, LMCacheLostError
from splitserve.kvconnector.lmcache.lane import Lane, Session
from splitserve.kvconnector.lmcache.link import Epoch, LMCacheLink
from splitserve.kvconnector.lmcache.wire import Operation, RetrievePrepared, StorePrepared
from splitserve.kvconnector.tiers.copies import PartialCopyError, ToldError
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier, TierState

logger = logging.getLogger(__name__)

LMCACHE = "lmcache"
MAX_COPY_BYTES = 128 << 20
MAX_BAD = 4096
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.0005, 0.02


class LMCacheStore:
    """Performs the copies of the LMCache tier; see :class:`splitserve.kvconnector.tiers.copies.SharedStore`.

    ``prefetch_seconds``: how long a lookup may wait for the server to fetch chunks from its own back ends. ``rank``:
    the rank of ``memory``; the heads of each rank are kept under separate names.
    """

    def __init__(self, memory: KVMemory, endpoint: str, prefetch_seconds: float, rank: int = 0) -> None:
        self._link = LMCacheLink(endpoint, memory.layout, memory.block_bytes, rank)
        self._block_size = memory.layout.block_size
        self._prefetch_seconds = prefetch_seconds
        self._down = Lane(self._link, memory)
        self._up = Lane(self._link, memory)
        self._bad: OrderedDict[bytes, None] = OrderedDict()  # last blocks of chunks that exist but are damaged

    def open(self, tell: Callable[[TierState], None]) -> None:
        def on_epoch(epoch: Epoch | None) -> None:
            chunk_tokens = 0 if epoch is None else epoch.chunk_tokens
            tell(TierState(LMCACHE, epoch is not None, chunk_tokens, self._link.num_clears))

        self._link.open(on_epoch)

    def _current(self, copy: ChainCopy) -> Epoch:
        """Return the current epoch. Raises :class:`ToldError` if the server is gone or the copy was planned for another
        chunk size."""
        try:
            epoch = self._link.epoch
        except LMCacheLostError as error:
            raise ToldError(0, str(error)) from error
        end = copy.first_block + len(copy.block_ids)
        starts_well = copy.is_load or copy.first_block % epoch.chunks.num_blocks == 0
        if not starts_well or end % epoch.chunks.num_blocks:
            raise ToldError(0, "its chunk size has changed")
        return epoch

    # ---- offload ----

    def store_chain(self, copy: ChainCopy) -> int:
        epoch = self._current(copy)
        size = epoch.chunks.num_blocks
        first, end = copy.first_block // size, (copy.first_block + len(copy.block_ids)) // size
        with self._down.session(copy, epoch) as session:
            key = session.key(first, end)
            prepared = session.call(Operation.PREPARE_STORE, key, epoch.instance_id, kind=StorePrepared).context
            if not prepared.slots:
                return 0  # all chunks exist or are being stored, or there is no room
            for number, slot in zip(prepared.chunk_indices, prepared.slots, strict=True):
                if not 0 <= number < end - first:
                    raise LMCacheError(f"it requested chunk {number} of {end - first}")
                part = slice(number * size, (number + 1) * size)
                contents = self._down.blocks.fetch(copy.block_ids[part])
                epoch.chunks.write(session.chunk(slot), copy.hashes[part], contents)
            if not session.call(Operation.COMMIT_STORE, key, epoch.instance_id, b"", kind=bool):
                raise LMCacheError("it no longer knows the store that was prepared")
            return len(prepared.slots) * size

    # ---- onboard ----

    def load_chain(self, copy: ChainCopy) -> int:
        epoch = self._current(copy)
        size = epoch.chunks.num_blocks
        first, end = copy.first_block // size, self._end_of_good(copy, size)
        if end <= first:
            return 0
        with self._up.session(copy, epoch) as session:
            session.locked = session.key(0, end, worker_id=None)
            session.call(Operation.LOOKUP, session.locked, 1)
            found = min(self._wait_for_prefetch(session), end)
            kept_from = first if found > first else found
            if kept_from > 0:  # chunks that are on the device already, or unusable
                session.call(Operation.FREE_LOOKUP_LOCKS, session.key(0, kept_from, worker_id=None), 1)
            session.locked = None  # from here on the server releases the locks itself
            if found <= first:
                return 0
            key = session.key(first, found)
            prepared = session.call(Operation.PREPARE_RETRIEVE, key, epoch.instance_id, kind=RetrievePrepared)
            if not prepared.success or len(prepared.context.slots) != found - first:
                return 0  # evicted meanwhile
            num_good = self._fetch_chunks(epoch, copy, [session.chunk(slot) for slot in prepared.context.slots])
            session.call(Operation.COMMIT_RETRIEVE, key, epoch.instance_id, kind=bool)
        wanted = found * size - copy.first_block
        if num_good < wanted:
            self._remember_bad(copy, num_good, size)
            raise PartialCopyError(num_good, f"block {copy.first_block + num_good} of a prompt is damaged in LMCache")
        return num_good

    def _wait_for_prefetch(self, session: Session) -> int:
        """Return how many leading chunks the server has, once they are ready in its memory."""
        deadline, pause_seconds = time.monotonic() + self._prefetch_seconds, FIRST_POLL_SECONDS
        while True:
            found = session.call(Operation.QUERY_PREFETCH_STATUS, session.request_id, kind=int | None)
            if found is not None:
                return int(found)
            if time.monotonic() >= deadline:
                raise LMCacheError(f"it did not fetch chunks from its back ends within {self._prefetch_seconds:g} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_POLL_SECONDS)

    def _fetch_chunks(self, epoch: Epoch, copy: ChainCopy, chunks: Sequence[Bytes]) -> int:
        """Copy the chunks into the copy's blocks; return how many leading blocks are correct."""
        form, num_good = epoch.chunks, 0
        skipped = copy.first_block % form.num_blocks  # blocks of the first chunk that are on the device already
        for chunk in chunks:
            end = num_good + form.num_blocks - skipped
            entries = form.entries(chunk)
            while num_good < end:
                count = min(self._up.blocks.most, end - num_good) if entries else 0
                wanted = range(num_good, num_good + count)
                num_right = self._fetch_blocks(form, chunk, entries, skipped, copy=copy, wanted=wanted)
                num_good, skipped = num_good + num_right, skipped + num_right
                if num_right < count or not count:
                    return num_good
            skipped = 0
        return num_good

    def _fetch_blocks(
        self, form: ChunkFormat, chunk: Bytes, entries: list[bytes], first: int, *, copy: ChainCopy, wanted: range
    ) -> int:
        """Copy the chunk's blocks from number ``first`` on into blocks ``wanted`` of the copy; return how many are
        correct."""
        block_ids, hashes = copy.block_ids[wanted.start : wanted.stop], copy.hashes[wanted.start : wanted.stop]
        num_right = 0
        for buffer, block_hash in zip(self._up.blocks.buffers(block_ids), hashes, strict=True):
            number = first + num_right
            np.copyto(buffer, form.block(chunk, number))
            if not form.is_right(entries[number], block_hash, buffer):
                break
            num_right += 1
        self._up.blocks.land(block_ids[:num_right])
        return num_right

    def _end_of_good(self, copy: ChainCopy, size: int) -> int:
        """Return the number of leading chunks without a chunk known to be damaged."""
        ends = range(-(copy.first_block + 1) % size, len(copy.hashes), size)
        bad = next((number for number in ends if copy.hashes[number] in self._bad), len(copy.hashes))
        return (copy.first_block + bad) // size

    def _remember_bad(self, copy: ChainCopy, num_good: int, size: int) -> None:
        """Remember a damaged chunk, so that it is not requested again: LMCache can neither remove it nor replace it."""
        number = num_good + -(copy.first_block + num_good + 1) % size
        self._bad[copy.hashes[number]] = None
        if len(self._bad) > MAX_BAD:
            self._bad.popitem(last=False)

    # ---- the whole ----

    def clear(self) -> None:
        self._link.clear()

    def close(self) -> None:
        for lane in (self._down, self._up):
            lane.close()
            lane.blocks.close()
        self._link.close()


def lmcache_tier(
    memory: KVMemory, endpoint: str, prefetch_seconds: float, rank: int = 0
) -> tuple[SharedTier, LMCacheStore, str]:
    """Return the tier, the store that performs its copies, and its description. Raises :class:`ConfigError`."""
    if problem := endpoint_problem(endpoint):
        raise ConfigError(f"lmcache_endpoint: {problem}")
    most = max(1, MAX_COPY_BYTES // memory.block_bytes)
    tier = SharedTier(LMCACHE, memory.layout.block_size, most)
    return tier, LMCacheStore(memory, endpoint, prefetch_seconds, rank), f"at {endpoint}, shared"
