"""The host tier: blocks in memory of this machine. On a GPU worker it is pinned, on the GPU's NUMA node.

The bytes of a block in a slot are those of the block on the device: whole blocks are copied, adjacent ones at once; or
some layers of all blocks, and then the next ones, where a step may wait for them (:mod:`.load_gates`).
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.cuda.host_store import MAX_KERNEL_BLOCK_BYTES, CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory, anonymous_memory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.layout.shape import block_bytes, runs
from splitserve.kvconnector.tiers.copies import TierStore
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.load_gates import LoadGates
from splitserve.kvconnector.tiers.registry import BuiltTier, TierContext
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion

HOST = "host"
MAX_COPY_BYTES = 64 << 20
MAX_GPU_LOAD_BYTES = 4 << 30
"""A request waits for its loads, and between two of them the link rests for as long as a thread takes to wake up."""
MAX_BLOCKS_PER_COPY = 256
MIN_LAYER_BYTES = 64 << 10
"""Of a block: copies of less leave the link idle."""


class HostTier(NamedTuple):
    """A tier, what carries its copies out, its description, what peers need to read from it, and where it is."""

    tier: Tier
    store: TierStore
    description: str
    memory: HostTierMemory | None
    host: HostMemory


def load_gates(layout: LayoutRecord, device: torch.device) -> LoadGates | None:
    """For steps that wait for the tier's loads on the device, where loads go layer by layer; None where they don't."""
    is_alone = device.type == "cuda" and layout.tensor_parallel_size == 1 and layout.num_layers > 1
    size = block_bytes(layout)
    is_large = size > MAX_KERNEL_BLOCK_BYTES and size >= layout.num_layers * MIN_LAYER_BYTES
    return LoadGates(layout.num_layers) if is_alone and is_large else None


def build(context: TierContext) -> BuiltTier:
    """Build the tier of one rank. Raises :class:`ConfigError`."""
    tier, store, description, served, host = host_tier(
        context.memory, context.engine.host_kv_memory_bytes, context.gates
    )
    return BuiltTier(tier, store, description, served, host)


def host_tier(memory: KVMemory, num_bytes: int, gates: LoadGates | None = None) -> HostTier:
    """A tier of ``num_bytes`` over all ranks; of one rank's heads, where there are several. Then no peer reads from it.

    Raises :class:`ConfigError`."""
    num_ranks = memory.layout.tensor_parallel_size
    num_bytes //= num_ranks
    num_slots = num_bytes // memory.block_bytes
    if num_slots < 1:
        raise ConfigError(f"--host-kv-memory is {num_bytes} bytes, less than one KV block of {memory.block_bytes}")
    try:
        host = HostMemory(num_slots * memory.block_bytes, node_of_device(memory.device))
        generations = np.frombuffer(anonymous_memory(num_slots * 8), dtype=np.uint64, count=num_slots)
        generations[:] = secrets.randbits(63)
        store = host_store(memory, host, gates)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(f"--host-kv-memory {num_bytes} can't be had: {error}") from error
    most = max(1, min(MAX_BLOCKS_PER_COPY, MAX_COPY_BYTES // memory.block_bytes))
    most_loaded = max(1, MAX_GPU_LOAD_BYTES // memory.block_bytes) if memory.device.type == "cuda" else None
    description = f"{num_slots} blocks, {host.describe()}" + (" on each rank" if num_ranks > 1 else "")
    description += ", loaded by layers" if gates is not None else ""
    if num_ranks > 1:
        return HostTier(Tier(HOST, TierIndex(num_slots), most, most_loaded), store, description, None, host)
    tier = Tier(HOST, TierIndex(num_slots, generations), most, most_loaded)
    slots = MemoryRegion(MemoryKind.DRAM, 0, host.address, num_slots, memory.block_bytes)
    served = HostTierMemory(slots, int(generations.ctypes.data))
    return HostTier(tier, store, description, served, host)


def host_store(memory: KVMemory, host: HostMemory, gates: LoadGates | None = None) -> TierStore:
    """Copies between the device's blocks and ``host``, by what the device has for it."""
    return CudaHostStore(memory, host, gates) if memory.device.type == "cuda" else CpuHostStore(memory, host)


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
