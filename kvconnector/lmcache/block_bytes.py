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
    """One thread's way to the bytes of blocks on the device, ``most`` of them at once."""

    most: int

    def fetch(self, block_ids: Sequence[int]) -> Iterator[Bytes]:
        """What is in the blocks, each uint8 ``[block_bytes]``; until the next one is asked for."""

    def buffers(self, block_ids: Sequence[int]) -> list[Bytes]:
        """Where the contents of at most :attr:`most` blocks shall be put; until the next call."""

    def land(self, block_ids: Sequence[int]) -> None:
        """Into the blocks with what was put into their buffers, from the first one on."""

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
        """They are there."""

    def close(self) -> None:
        """Nothing to give back."""


class CudaBlockBytes:
    """Through pinned memory. Make it before anybody uses the device's blocks: trying out how to copy writes to them."""

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
