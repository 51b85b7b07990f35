"""The host tier: blocks in memory of this machine. On a GPU worker it is pinned, on the GPU's NUMA node.

The bytes of a block in a slot are those of the block on the device: whole blocks are copied, adjacent ones at once.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.errors import ConfigError
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.tier_copies import TierStore
from splitserve.kvconnector.tier_index import TierIndex
from splitserve.kvconnector.tiers import Tier

HOST = "host"
MAX_COPY_BYTES = 64 << 20
MAX_BLOCKS_PER_COPY = 256


def runs(block_ids: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(first block, first slot, number of blocks)`` of the longest stretches that are adjacent on both sides."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        is_over = end == len(block_ids)
        if is_over or block_ids[end] != block_ids[end - 1] + 1 or slots[end] != slots[end - 1] + 1:
            yield block_ids[start], slots[start], end - start
            start = end


def host_tier(memory: KVMemory, num_bytes: int) -> tuple[Tier, TierStore, str]:
    """A tier of ``num_bytes``, what carries its copies out, and its description. Raises :class:`ConfigError`."""
    num_slots = num_bytes // memory.block_bytes
    if num_slots < 1:
        raise ConfigError(f"--host-kv-memory is {num_bytes} bytes, less than one KV block of {memory.block_bytes}")
    try:
        host = HostMemory(num_slots * memory.block_bytes, node_of_device(memory.device))
        store = host_store(memory, host)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(f"--host-kv-memory {num_bytes} can't be had: {error}") from error
    most = max(1, min(MAX_BLOCKS_PER_COPY, MAX_COPY_BYTES // memory.block_bytes))
    return Tier(HOST, TierIndex(num_slots), most), store, f"{num_slots} blocks, {host.describe()}"


def host_store(memory: KVMemory, host: HostMemory) -> TierStore:
    """Copies between the device's blocks and ``host``, by what the device has for it."""
    return CudaHostStore(memory, host) if memory.device.type == "cuda" else CpuHostStore(memory, host)


class CpuHostStore:
    """Plain copies on the calling thread, with the GIL released."""

    def __init__(self, memory: KVMemory, host: HostMemory) -> None:
        flat = memory.blocks.view(-1).view(torch.uint8).numpy()
        self._blocks: npt.NDArray[np.uint8] = flat.reshape(memory.num_blocks, memory.block_bytes)
        self._slots: npt.NDArray[np.uint8] = host.bytes.reshape(-1, memory.block_bytes)

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        del hashes
        for block, slot, count in runs(block_ids, slots):
            np.copyto(self._slots[slot : slot + count], self._blocks[block : block + count])

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        del hashes
        for block, slot, count in runs(block_ids, slots):
            np.copyto(self._blocks[block : block + count], self._slots[slot : slot + count])

    def clear(self) -> None:
        """What was stored isn't found any more."""

    def close(self) -> None:
        """Nothing to give back: the memory goes with the process."""


class CudaHostStore:
    """Copies by the GPU's copy engines, each direction on a stream of its own, from and to registered memory."""

    def __init__(self, memory: KVMemory, host: HostMemory) -> None:
        self._device = memory.device
        self._blocks = memory.blocks.view(-1).view(torch.uint8).view(memory.num_blocks, memory.block_bytes)
        self._host = host
        self._slots = torch.from_numpy(host.bytes).view(-1, memory.block_bytes)
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(host.address, len(host.bytes), 0)  # type: ignore[no-untyped-call]
            if int(status) != 0:
                raise RuntimeError(f"cudaHostRegister of {len(host.bytes)} bytes failed with {status}")
            self._down = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._up = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """The blocks are complete: the step that computed them is over."""
        del hashes
        with torch.cuda.device(self._device), torch.cuda.stream(self._down):
            for block, slot, count in runs(block_ids, slots):
                self._slots[slot : slot + count].copy_(self._blocks[block : block + count], non_blocking=True)
            _wait_for(self._down)

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """No step touches the blocks yet: those that read them are launched once this has returned."""
        del hashes
        with torch.cuda.device(self._device), torch.cuda.stream(self._up):
            for block, slot, count in runs(block_ids, slots):
                self._blocks[block : block + count].copy_(self._slots[slot : slot + count], non_blocking=True)
            _wait_for(self._up)

    def clear(self) -> None:
        """What was stored isn't found any more."""

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._host.address)  # type: ignore[no-untyped-call]


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Sleeps rather than spins: the engine loop needs the core, and the GIL."""
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(stream)
    done.synchronize()
