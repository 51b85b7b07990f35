"""Digests of KV blocks, for ``--verify-kv``: the source sends them with its offers, the reader computes its own of the
landed blocks.

A digest covers a whole block as it is in memory. A read copies whole blocks, and an offered block is not written any
more, including the unused end of a prompt's last block.
"""

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from splitserve.kvconnector.layout.memory import KVMemory

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
DIGEST_THREADS = 2

DigestBlocks: TypeAlias = Callable[[Sequence[int], int], list[bytes]]
"""Function that returns the digest of each given block of a group of this worker, by block id. Called from several
threads."""

LeadingDigests: TypeAlias = Callable[[Sequence[int], int], list[bytes]]
"""Function that returns the digests of the leading blocks of a group, as many as are known by now; the others follow
later."""


def no_digests(block_ids: Sequence[int], group: int = 0) -> list[bytes]:
    """Return an empty digest for each block: verification is off, and empty digests match everything."""
    del group
    return [b""] * len(block_ids)


def digests_of(memory: KVMemory) -> DigestBlocks:
    """Return a function that computes BLAKE2b of each block's bytes, copying them to the host first if they are on a
    GPU."""
    on_host = [
        _on_host if memory.device.type == "cpu" else _Staging(memory.device, g.block_bytes) for g in memory.groups
    ]

    def digest_blocks(block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        blocks, host_bytes = memory.groups[group].bytes, on_host[group]
        return [
            hashlib.blake2b(host_bytes(blocks[block_id]), digest_size=DIGEST_BYTES).digest() for block_id in block_ids
        ]

    return digest_blocks


def _on_host(block: torch.Tensor) -> Any:
    return block.numpy().data


class _Staging:
    """Copier of a GPU's blocks through pinned memory: a buffer per thread, one stream separate from the steps'
    stream."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._of_thread = threading.local()

    def __call__(self, block: torch.Tensor) -> Any:
        """Return the bytes of ``block``, valid until this thread's next call."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=True)
            self._of_thread.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        buffer, copied = self._of_thread.buffer, self._of_thread.copied
        with torch.cuda.stream(self._stream):
            buffer.copy_(block, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        return buffer.numpy().data


_Location: TypeAlias = tuple[int, int]
"""Group and id of a block."""


class FirstDigests:
    """:data:`LeadingDigests` of each content as it was when it was first requested, computed on separate threads.

    A block that is damaged while it is cached therefore does not pass for intact when a later prompt offers it again,
    and the engine loop never waits for a digest. ``wake`` is called from those threads when more digests are known.
    """

    def __init__(self, memory: KVMemory, wake: Callable[[], None]) -> None:
        self._memory = memory
        self._wake = wake
        self._digest_blocks = digests_of(memory)
        self._known: dict[_Location, tuple[int, bytes]] = {}  # a generation and the digest of that content
        self._asked: dict[_Location, int] = {}  # the generation that was requested last
        self._questions: queue.SimpleQueue[tuple[_Location, int]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[_Location, int, bytes]] = queue.SimpleQueue()
        for index in range(DIGEST_THREADS):
            threading.Thread(target=self._answer, name=f"digest-{index}", daemon=True).start()

    def __call__(self, block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        """Return the known digests and request the missing ones. Called by the engine loop's thread only."""
        self._take_answers()
        leading: list[bytes] = []
        all_known = True
        for block_id in block_ids:
            location = group, block_id
            generation = int(self._memory.groups[group].generations[block_id])
            known = self._known.get(location)
            if known is not None and known[0] == generation:
                if all_known:
                    leading.append(known[1])
                continue
            all_known = False
            if self._asked.get(location) != generation:
                self._asked[location] = generation
                self._questions.put((location, generation))
        return leading

    def _take_answers(self) -> None:
        """Keep the digests that have arrived. Threads may overtake each other, so the digest of an older content may
        come after a newer one's."""
        while not self._answers.empty():
            location, generation, digest = self._answers.get()
            if self._asked[location] == generation:
                self._known[location] = generation, digest

    def _answer(self) -> None:
        while True:
            location, generation = self._questions.get()
            group, block_id = location
            try:
                [digest] = self._digest_blocks([block_id], group)
            except Exception:
                logger.exception("cannot compute the digest of block %d; it will never be offered", block_id)
                continue
            self._answers.put((location, generation, digest))
            self._wake()
