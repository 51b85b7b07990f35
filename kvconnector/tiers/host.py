"""The host tier: blocks in host memory of this machine. On a GPU worker it is pinned, on the GPU's NUMA node.

A slot holds the same bytes as the block on the device. Whole blocks are copied, adjacent ones at once; or one group of
layers of all blocks after another, if a step may wait for them (:mod:`.load_gates`).
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.cuda.host_store import MAX_KERNEL_BLOCK_BYTES, CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory, anonymous_memory, check_available
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_device
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.tiers.copies import TierStore
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.load_gates import LoadGates
from splitserve.kvconnector.tiers.registry import BuiltTier, TierContext
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion

HOST = "host"
MAX_COPY_BYTES = 64 << 20
MAX_GPU_LOAD_BYTES = 4 << 30
"""Large, because a request waits for its loads, and between two of them the link is idle while a thread wakes up."""
MAX_BLOCKS_PER_COPY = 256
MIN_LAYER_BYTES = 64 << 10
"""Least bytes per layer of a block for loads by layer: smaller copies leave the link idle."""


class HostTier(NamedTuple):
    """The host tier of one rank."""

    tier: Tier
    store: TierStore  # performs the tier's copies
    description: str
    memory: HostTierMemory | None  # location for peers that read from it; None if none may
    host: HostMemory


def load_gates(layout: LayoutRecord, device: torch.device) -> LoadGates | None:
    """Return gates for steps that wait on the device for the tier's loads; None if loads are not done by layer."""
    blocks = layout.block_layout
    by_layers = layout.cache.is_simple and blocks.num_layers > 1  # a layer's bytes are one run of the block
    is_alone = device.type == "cuda" and blocks.num_ranks == 1
    size = blocks.block_bytes
    is_large = size > MAX_KERNEL_BLOCK_BYTES and size >= blocks.num_layers * MIN_LAYER_BYTES
    return LoadGates(blocks.num_layers) if by_layers and is_alone and is_large else None


def build(context: TierContext) -> BuiltTier:
    """Build the tier of one rank. Raises :class:`ConfigError`."""
    tier, store, description, served, host = host_tier(
        context.memory, context.engine.host_kv_memory_bytes, context.gates
    )
    return BuiltTier(tier, store, description, served, host)


def host_tier(memory: KVMemory, num_bytes: int, gates: LoadGates | None = None) -> HostTier:
    """Return a host tier of ``num_bytes`` over all ranks; with several ranks, the part of one rank, which peers can't
    read.

    Raises :class:`ConfigError`.
    """
    num_ranks = memory.layout.tensor_parallel_size
    num_bytes //= num_ranks
    num_slots = num_bytes // memory.block_bytes
    if num_slots < 1:
        raise ConfigError(
            f"--host-kv-memory is {num_bytes} bytes, less than one KV block of {memory.block_bytes} bytes"
        )
    check_available(num_bytes, "--host-kv-memory")
    try:
        host = HostMemory(num_slots * memory.block_bytes, node_of_device(memory.device))
        generations = np.frombuffer(anonymous_memory(num_slots * 8), dtype=np.uint64, count=num_slots)
        generations[:] = secrets.randbits(63)
        store = host_store(memory, host, gates)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(f"cannot allocate --host-kv-memory of {num_bytes} bytes: {error}") from error
    on_gpu = memory.device.type == "cuda"
    description = f"{num_slots} blocks, {host.describe()}" + (" on each rank" if num_ranks > 1 else "")
    description += ", loaded by layers" if gates is not None else ""
    if num_ranks > 1:
        return HostTier(make_tier(num_slots, memory.block_bytes, on_gpu=on_gpu), store, description, None, host)
    tier = make_tier(num_slots, memory.block_bytes, on_gpu=on_gpu, generations=generations)
    slots = MemoryRegion(MemoryKind.DRAM, 0, host.address, num_slots, memory.block_bytes)
    served = HostTierMemory(slots, int(generations.ctypes.data))
    return HostTier(tier, store, description, served, host)


def make_tier(
    num_slots: int, block_bytes: int, *, on_gpu: bool, generations: "npt.NDArray[np.uint64] | None" = None
) -> Tier:
    """Return the tier's index, with bounds of its copies; ``generations``: None if peers can't read it."""
    most = max(1, min(MAX_BLOCKS_PER_COPY, MAX_COPY_BYTES // block_bytes))
    most_loaded = max(1, MAX_GPU_LOAD_BYTES // block_bytes) if on_gpu else None
    return Tier(HOST, TierIndex(num_slots, generations), most, most_loaded)


def host_store(memory: KVMemory, host: HostMemory, gates: LoadGates | None = None) -> TierStore:
    """Return the store that copies between the device's blocks and ``host``, suitable for the device."""
    return CudaHostStore(memory, host, gates) if memory.device.type == "cuda" else CpuHostStore(memory, host)


class CpuHostStore:
    """Plain copies on the calling thread, with the GIL released."""

    def __init__(self, memory: KVMemory, host: HostMemory) -> None:
        self._blocks: npt.NDArray[np.uint8] = memory.bytes.numpy()
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
        """Do nothing: the index no longer finds the stored content."""

    def close(self) -> None:
        """Do nothing: the memory is released with the process."""
