"""The disk tier: one file per block, in a directory of bounded size that the worker's next incarnation reuses.

A slot is a file, written under another name first: it exists as a whole or not at all. Its first :data:`HEADER_BYTES`
describe the content and carry a checksum. A truncated or damaged file, or one of another model, is a miss and is
removed. Each rank of a worker has a directory of its own (:func:`rank_folder`), with its heads of the same blocks in
the same slots; a block that is missing on one rank counts as missing on all.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.nixl.files import FileAgent, FileRange, FileTransferError
from splitserve.kvconnector.tiers.copies import PartialCopyError, TierFullError, TierStore
from splitserve.kvconnector.tiers.host import host_store
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.registry import BuiltTier, TierContext
from splitserve.kvconnector.tiers.slot_folder import (
    FULL,
    HEADER_BYTES,
    Bytes,
    DiskFullError,
    Header,
    SlotFolder,
    private_folder,
)
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.block_hash import shard_root

logger = logging.getLogger(__name__)

DISK = "disk"
MAX_COPY_BYTES = 32 << 20
MAX_BLOCKS_PER_COPY = 64
LOCK_SECONDS = 10.0
"""Time that a rank waits for the lock of its previous incarnation, which may end a little later than its worker."""


class _Lane:
    """Staging for copies in one direction, with the agents that move it from and to the device, from and to files."""

    def __init__(self, name: str, memory: KVMemory, num_blocks: int, backend: str) -> None:
        self._name = name
        self._backend = backend
        self._memory = memory
        self._num_blocks = num_blocks
        self._make()

    def _make(self) -> None:
        memory = self._memory
        self.staging = HostMemory(self._num_blocks * memory.block_bytes, node_of_device(memory.device))
        self.device = host_store(memory, self.staging)
        self.headers = HostMemory(self._num_blocks * HEADER_BYTES)
        self.files = FileAgent(self._name, [self.staging, self.headers], self._backend)

    def renew(self) -> None:
        """Replace the staging after a failure: an abandoned transfer may still write to the old memory, which its agent
        keeps."""
        self.device.close()
        self._make()

    def data(self, number: int) -> Bytes:
        """Return the bytes of staged block ``number``."""
        size = self._memory.block_bytes
        return self.staging.bytes[number * size : (number + 1) * size]

    def header(self, number: int) -> Bytes:
        return self.headers.bytes[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]

    def ranges(self, files: Sequence[int]) -> list[FileRange]:
        """Return the ranges of staged blocks 0, 1, ... and their headers, each with one of ``files``."""
        size = self._memory.block_bytes
        heads = (FileRange(self.headers.address + n * HEADER_BYTES, f, 0, HEADER_BYTES) for n, f in enumerate(files))
        bodies = (FileRange(self.staging.address + n * size, f, HEADER_BYTES, size) for n, f in enumerate(files))
        return [*heads, *bodies]


class DiskStore:
    """Performs copies of the disk tier, with separate staging for each direction."""

    def __init__(
        self, memory: KVMemory, folder: SlotFolder, root: bytes, max_blocks: int, backend: str = "posix"
    ) -> None:
        self._folder = folder
        self._open_flags = os.O_DIRECT if backend == "gds" else 0  # required by cuFile
        self._root = root
        self._file_bytes = HEADER_BYTES + memory.block_bytes  # size of a slot's file
        self._down = _Lane("disk-down", memory, max_blocks, backend)
        self._up = _Lane("disk-up", memory, max_blocks, backend)

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        lane = self._down
        lane.device.store(block_ids, range(len(block_ids)), hashes)
        for number, block_hash in enumerate(hashes):
            header = Header.of(self._root, block_hash, lane.data(number))
            lane.header(number)[:] = np.frombuffer(header.encode(), dtype=np.uint8)
        names = [self._folder.slot(slot) for slot in slots]
        try:
            self._write(names)
        except OSError as error:
            if error.errno not in FULL:
                raise
            for name in names:  # what they hold is evicted: in its place there may be room
                self._folder.remove(name)
            self._write_again(names)

    def _write_again(self, names: Sequence[str]) -> None:
        try:
            self._write(names)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise TierFullError(0, f"{self._folder.path}: {error.strerror}") from error

    def _write(self, names: Sequence[str]) -> None:
        """Write the staged blocks into files, each complete before it gets its name."""
        lane, new_names = self._down, [f"{name}.new" for name in names]
        try:
            with contextlib.ExitStack() as stack:
                files = []
                for name in new_names:
                    files.append(self._folder.create(name, self._open_flags))
                    stack.callback(os.close, files[-1])
                for file in files:
                    os.posix_fallocate(file, 0, self._file_bytes)  # reports a full disk here, with a clear error
                lane.files.write(lane.ranges(files))
                for file in files:
                    _mark_used(file)
            for new_name, name in zip(new_names, names, strict=True):
                self._folder.rename(new_name, name)
        except FileTransferError:
            lane.renew()
            raise
        finally:
            for name in new_names:
                self._folder.remove(name)

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        lane, names = self._up, [self._folder.slot(slot) for slot in slots]
        with contextlib.ExitStack() as stack:
            files: list[int] = []
            problem = ""
            for name in names:
                try:
                    files.append(self._folder.open(name, os.O_RDONLY | os.O_NONBLOCK | self._open_flags))
                    stack.callback(os.close, files[-1])
                    problem = self._folder.check(files[-1])
                except OSError as error:
                    problem = f"can't be opened: {error.strerror}"
                if problem:
                    break
            num_whole = len(files) if not problem else names.index(name)
            if num_whole:
                try:
                    lane.files.read(lane.ranges(files[:num_whole]))
                except FileTransferError:
                    lane.renew()
                    raise
                for file in files[:num_whole]:
                    _mark_used(file)
        num_good = self._num_right(hashes[:num_whole])
        lane.device.load(block_ids[:num_good], range(num_good), hashes[:num_good])
        if num_good < len(names):
            self._folder.remove(names[num_good])
            problem = problem if num_good == num_whole else "is damaged"
            raise PartialCopyError(num_good, f"{self._folder.path / names[num_good]} {problem}")

    def _num_right(self, hashes: Sequence[bytes]) -> int:
        """Return the number of staged blocks before the first with a wrong header or checksum."""
        lane = self._up
        for number, block_hash in enumerate(hashes):
            header = Header.parse(lane.header(number).tobytes())
            if header != Header.of(self._root, block_hash, lane.data(number)):
                return number
        return len(hashes)

    def clear(self) -> None:
        self._folder.clear()

    def close(self) -> None:
        self._down.device.close()
        self._up.device.close()
        self._folder.close()


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's files, given the worker's folder, which is rank 0's."""
    return folder / f"rank-{rank}" if rank else folder


def build(context: TierContext) -> BuiltTier | None:
    """Build the tier of one rank. Without room for its folder and lock a worker of one rank goes on without the tier;
    several ranks would have to agree. Raises :class:`ConfigError`."""
    engine, memory, rank = context.engine, context.memory, context.rank
    folder, root = Path(engine.disk_kv_dir) / context.engine_id, shard_root(memory.layout, rank)
    try:
        return BuiltTier(*disk_tier(memory, folder, engine.disk_kv_bytes, root, engine.disk_kv_backend, rank=rank))
    except DiskFullError as error:
        if engine.tensor_parallel_size > 1:
            raise
        logger.warning("the disk tier is off until the next start: %s", error)
        return None


def disk_tier(
    memory: KVMemory, path: Path, num_bytes: int, root: bytes, backend: str = "posix", *, rank: int = 0
) -> tuple[Tier, TierStore, str]:
    """Return a tier of at most ``num_bytes`` over all ranks in ``path``, the store that performs its copies, and its
    description; with several ranks, the part of ``rank``.

    The tier includes the content of earlier incarnations, as far as it fits. Raises :class:`ConfigError`.
    """
    num_ranks = memory.layout.tensor_parallel_size
    num_slots = num_bytes // num_ranks // (HEADER_BYTES + memory.block_bytes)
    if num_slots < 1:
        raise ConfigError(
            f"--disk-kv-size is {num_bytes} bytes, less than one KV block of {num_ranks * memory.block_bytes} bytes"
        )
    lock_seconds = LOCK_SECONDS if rank else 0.0
    if rank:
        os.close(private_folder(path))  # rank 0's folder, which contains this rank's
    folder = SlotFolder(rank_folder(path, rank), root, num_slots, memory.block_bytes, lock_seconds=lock_seconds)
    if rank == 0:
        _remove_other_ranks(path, num_ranks)
    index = TierIndex(num_slots)
    index.adopt(folder.contents())
    most = max(1, min(MAX_BLOCKS_PER_COPY, MAX_COPY_BYTES // memory.block_bytes))
    try:
        store = DiskStore(memory, folder, root, most, backend)
    except ConfigError:
        folder.close()
        raise
    return Tier(DISK, index, most), store, f"{num_slots} blocks in {path}"


def keep_common(index: TierIndex, others: Sequence[Sequence[tuple[bytes, int]]]) -> None:
    """Forget content that is not in the same slot on each of the ``others``, given as the hashes and slots that they
    found."""
    common = set(index.contents()).intersection(*others)
    for block_hash, slot in index.contents():
        if (block_hash, slot) not in common:
            index.forget(block_hash)


def _remove_other_ranks(folder: Path, num_ranks: int) -> None:
    """Remove the folders of ranks that the worker no longer has."""
    for path in folder.glob("rank-*"):
        number = re.fullmatch(r"rank-(\d+)", path.name)
        if number is not None and int(number[1]) >= num_ranks:
            shutil.rmtree(path, ignore_errors=True)


def _mark_used(file: int) -> None:
    """Set the time of a file's last use, for the next incarnation. The kernel's own timestamps have a resolution of
    milliseconds only."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
