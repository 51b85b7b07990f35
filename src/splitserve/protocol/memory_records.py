"""Records of a worker's KV memory: its shape, its location, and how peers can read it. They travel in messages
(:mod:`splitserve.protocol.messages`)."""

from enum import StrEnum
from functools import lru_cache
from typing import Annotated

import msgspec

from splitserve.protocol.cache_layout import (
    DTYPE_BYTES,
    MAX_GROUPS,
    MAX_LAYERS,
    BlockLayout,
    CacheGroup,
    CacheLayout,
    Field,
    GroupKind,
    Sharding,
)
from splitserve.protocol.wire_numbers import Count, Size, Unsigned

BLOCK_ORDER = "layer, kv_head, 2 (K/V), token, head_dim"
TRANSFORMERS_ORDER = f"{BLOCK_ORDER} of transformers"  # whose code orders a head's elements in its own way
LATENT_ORDER = "layer, token, latent"  # of latent attention (MLA): one head, of ``head_dim`` elements


class LayoutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a worker's KV memory. Two workers must agree on it to exchange blocks, tensor parallelism aside.

    A block is contiguous, its dimensions in the order of ``order``. ``num_kv_heads`` counts the model's; with tensor
    parallelism every rank has blocks of its own, with :attr:`kv_heads_per_rank` of them.

    ``groups`` are those of the cache; empty for one full group of all layers, with keys and values as its only field.
    The first group is a full one.
    """

    model: str
    weights_version: str
    dtype: str
    block_size: Size
    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    tensor_parallel_size: Size = 1
    order: str = BLOCK_ORDER
    groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()

    def __post_init__(self) -> None:
        if self.groups and CacheLayout(self.groups).groups[0].block_tokens != self.block_size:
            raise ValueError(
                f"the groups' blocks have {self.groups[0].block_tokens} tokens, the layout's {self.block_size}"
            )

    @property
    def problem(self) -> str | None:
        """The reason, in words, why this process can't use such a layout, or None. A newer peer's may have one."""
        if self.num_layers > MAX_LAYERS:
            return f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}"
        if not self.groups and self.dtype not in DTYPE_BYTES:
            return f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}"
        return None

    @property
    def kv_heads_per_rank(self) -> int:
        """One at least: with more ranks than heads, neighbouring ranks hold the same head."""
        return self.block_layout.heads_per_rank()

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The sizes of one rank's block in the order of ``order``, for the kernels' view of the first group's
        memory."""
        if self.order == LATENT_ORDER:
            return self.block_layout.num_layers, self.block_size, self.head_dim
        return self.block_layout.num_layers, self.kv_heads_per_rank, 2, self.block_size, self.head_dim

    @property
    def dimensions(self) -> tuple[str, int, int, int]:
        """Dimensions of the model's blocks that names of the content leave out."""
        return self.order, self.num_layers, self.num_kv_heads, self.head_dim

    @property
    def cache(self) -> CacheLayout:
        """The same as groups of layers with fields of bytes: all that transports need."""
        return _cache_of(self)

    @property
    def block_layout(self) -> BlockLayout:
        """The layout of one rank's blocks of the first group."""
        return self.cache.blocks()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the first group, of one rank, over its layers: contiguous, so one descriptor moves
        it."""
        return self.block_layout.block_bytes

    def mismatch(self, other: "LayoutRecord") -> str | None:
        """The first difference in words (``name: ours against theirs``) that keeps two workers from exchanging blocks,
        or None. ``tensor_parallel_size`` may differ: ranks read from those that hold their heads."""
        for name in self.__struct_fields__:
            if name != "tensor_parallel_size" and getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)!r} against {getattr(other, name)!r}"
        return None


def latent_group(num_layers: int, block_size: int, width: int, dtype: str) -> CacheGroup:
    """Return the only group of a cache of latents, ``width`` elements per token and layer: every rank has all of
    them."""
    field = Field("latent", dtype, 1, block_size * width * DTYPE_BYTES[dtype], Sharding.WHOLE)
    return CacheGroup(GroupKind.FULL, tuple(range(num_layers)), block_size, (field,))


@lru_cache(maxsize=64)
def _cache_of(layout: LayoutRecord) -> CacheLayout:
    """Return the groups; without any, one full group with one field: keys and values of a head beside each other."""
    if layout.groups:
        return CacheLayout(layout.groups, layout.tensor_parallel_size)
    head_bytes = 2 * layout.block_size * layout.head_dim * DTYPE_BYTES[layout.dtype]
    kv = Field("kv", layout.dtype, layout.num_kv_heads, head_bytes)
    full = CacheGroup(GroupKind.FULL, tuple(range(layout.num_layers)), layout.block_size, (kv,))
    return CacheLayout((full,), layout.tensor_parallel_size)


class MemoryKind(StrEnum):
    """The kind of memory that holds KV blocks. The values are NIXL's."""

    DRAM = "DRAM"  # host memory
    VRAM = "VRAM"  # a GPU's

    @property
    def words(self) -> str:
        return "host memory" if self is MemoryKind.DRAM else "a GPU's memory"


IpcHandle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class MappableMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's memory as processes on the same machine can map it: a CUDA IPC handle of the allocation that contains it,
    and its offset there. ``machine`` identifies the machine; "" if the platform has no such identifier."""

    handle: IpcHandle
    offset: Count
    machine: Annotated[str, msgspec.Meta(max_length=64)] = ""


class MemoryRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Registered KV blocks. ``device_id`` numbers a GPU as the process that owns the memory does; 0 for host memory."""

    kind: MemoryKind
    device_id: Count
    blocks_address: Unsigned
    num_blocks: Size
    block_bytes: Size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class GatherMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slots in which a rank gathers heads of blocks for a reader, as blocks of a region; their tickets (uint64, one per
    slot) are in host memory. See :mod:`splitserve.kvconnector.transfer.gather`."""

    slots: MemoryRegion
    tickets_address: Unsigned


class HostTierMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host tier of a worker without tensor parallelism: slots, as blocks of a region of host memory, numbered on
    from the device's blocks; their generations (uint64, one per slot) are in host memory."""

    slots: MemoryRegion
    generations_address: Unsigned


class SharedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table in host memory as processes on the same machine can map it: a sealed file without a name, the owner's
    ``descriptor`` in process ``pid``. The file begins with ``token``, random bytes by which a reader recognises it."""

    pid: Size
    descriptor: Count
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a tensor-parallel worker, as a reader needs it. ``metadata`` is the connector's own.

    ``regions`` has one for each group of the cache. The rest is there for caches of one full group only. ``mappable``:
    on a GPU, the memory of the blocks and that of the slots; ``generations``: the table of the blocks' generations.
    """

    metadata: bytes
    regions: Annotated[list[MemoryRegion], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    gather: GatherMemory | None = None
    host: HostTierMemory | None = None
    mappable: Annotated[list[MappableMemory], msgspec.Meta(max_length=2)] = []
    generations: SharedTable | None = None

    @property
    def region(self) -> MemoryRegion:
        """The blocks of the first group."""
        return self.regions[0]
