"""Bytes of KV blocks as LMCache moves them, in host memory and on a GPU."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.lmcache.chunk import Bytes
from splitserve.kvconnector.tiers.host import host_store

STAGING_BYTES = 64 << 20
"""Pinned memory for each direction, on a GPU worker."""


class BlockBytes(Protocol):
    """Access of one thread to the bytes of blocks on the device, at most ``most`` blocks at once."""

    most: int

    def fetch(self, block_ids: Sequence[int]) -> Iterator[Bytes]:
        """Yield the content of each block, uint8 ``[block_bytes]``, valid until the next one is requested."""

    def buffers(self, block_ids: Sequence[int]) -> list[Bytes]:
        """Return the buffers for the contents of at most :attr:`most` blocks; valid until the next call."""

    def land(self, block_ids: Sequence[int]) -> None:
        """Copy the contents of the buffers, starting with the first, into the blocks."""

    def close(self) -> None: ...


class CpuBlockBytes:
    def __init__(self, memory: KVMemory) -> None:
        self.most = memory.num_blocks
        self._blocks: Bytes = memory.bytes.numpy()

    def fetch(self, block_ids: Sequence[int]) -> Iterator[Bytes]:
        return (self._blocks[block_id] for block_id in block_ids)

    def buffers(self, block_ids: Sequence[int]) -> list[Bytes]:
        return [self._blocks[block_id] for block_id in block_ids]

    def land(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the buffers are the blocks."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class CudaBlockBytes:
    """Block bytes of a GPU, copied through pinned memory. Create it before the device's blocks are used: measuring the
    copy methods writes to them."""

    def __init__(self, memory: KVMemory) -> None:
        self.most = max(2, STAGING_BYTES // memory.block_bytes)
        size = memory.block_bytes
        staging = HostMemory(self.most * size, node_of_device(memory.device))
        self._staged = [staging.bytes[number * size : (number + 1) * size] for number in range(self.most)]
        self._device = host_store(memory, staging)

    def fetch(self, block_ids: Sequence[int]) -> Iterator[Bytes]:
        for part in batches(block_ids, self.most):
            self._device.store(part, range(len(part)), ())
            yield from self._staged[: len(part)]

    def buffers(self, block_ids: Sequence[int]) -> list[Bytes]:
        return self._staged[: len(block_ids)]

    def land(self, block_ids: Sequence[int]) -> None:
        self._device.load(block_ids, range(len(block_ids)), ())

    def close(self) -> None:
        self._device.close()


def batches(block_ids: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(block_ids), most):
        yield block_ids[start : start + most]


def block_bytes_of(memory: KVMemory) -> BlockBytes:
    return CudaBlockBytes(memory) if memory.device.type == "cuda" else CpuBlockBytes(memory)
