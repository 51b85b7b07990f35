"""KV memory of one worker: allocated once, never moved."""

import ctypes
import logging
import mmap
import threading
from collections.abc import Sequence

import psutil
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.shared_table import OwnTable
from splitserve.protocol.cache_layout import DTYPE_BYTES, BlockLayout
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind, MemoryRegion

logger = logging.getLogger(__name__)

POPULATE_CHUNK_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14: allocates pages and keeps their content

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


class GroupMemory:
    """Blocks of one group of the cache, and their generations.

    ``bytes``: uint8 ``[num_blocks, block_bytes]`` on ``device``; ``generations``: uint64 ``[num_blocks]``, always on
    the host, in a ``table`` that other processes can map. Raises :class:`ConfigError` for more memory than there is.
    """

    def __init__(self, block_bytes: int, num_blocks: int, device: torch.device | None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV memory is smaller than one block of {block_bytes} bytes; raise --kv-memory")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        num_bytes = num_blocks * block_bytes
        try:
            if device is None or device.type == "cpu":
                flat = _populated_later(num_bytes)
            else:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                flat.zero_()
        except (OSError, torch.OutOfMemoryError) as error:
            raise ConfigError(f"cannot allocate {_gib(num_bytes)} of KV memory; lower --kv-memory") from error
        self.bytes = flat.view(num_blocks, block_bytes)
        self.table = OwnTable(num_blocks)
        self.generations = self.table.numbers

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.VRAM if self.bytes.is_cuda else MemoryKind.DRAM

    def region(self) -> MemoryRegion:
        """Return the location of the blocks, for peers that read them."""
        return MemoryRegion(
            kind=self.kind,
            device_id=self.bytes.device.index or 0,
            blocks_address=self.bytes.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
        )

    @property
    def generations_address(self) -> int:
        return int(self.generations.ctypes.data)


class KVMemory:
    """Blocks and their generations: an allocation for each group of the cache, in ``groups``.

    The other attributes are the first group's. ``bytes``: uint8 ``[num_blocks, block_bytes]`` on ``device``, all that
    transfers use; ``generations``: uint64 ``[num_blocks]``, always on the host.

    ``num_blocks``: of the only group, or of each. CPU memory asks for huge pages: a peer's copy walks the pages, and
    with 4 KiB pages the walk costs as much as the copy. A separate thread allocates its pages, because the first touch
    of a gigabyte takes seconds on a virtual machine; a page that is needed sooner is allocated when it is touched.
    Raises :class:`ConfigError` at once for more memory than the machine has available.
    """

    def __init__(
        self, layout: LayoutRecord, num_blocks: int | Sequence[int], device: torch.device | None = None
    ) -> None:
        self.layout = layout
        numbers = [num_blocks] if isinstance(num_blocks, int) else list(num_blocks)
        cache = layout.cache
        if len(numbers) != len(cache.groups):
            raise ValueError(f"numbers of blocks {numbers} for a cache of {len(cache.groups)} groups")
        self.groups = [GroupMemory(cache.blocks(i).block_bytes, count, device) for i, count in enumerate(numbers)]
        self.num_blocks, self.block_bytes = self.groups[0].num_blocks, self.groups[0].block_bytes
        self.bytes, self.generations = self.groups[0].bytes, self.groups[0].generations

    def kernel_view(self, group: int = 0) -> torch.Tensor:
        """Return the kernels' view of a group with one field, ``[num_blocks, layer, ...]`` in the layout's order.

        Layers are numbered within the group."""
        layout = self.layout
        cached = layout.cache.groups[group]
        assert len(cached.fields) == 1, f"group {group} has {len(cached.fields)} fields, not one"
        shape = (cached.num_layers, *layout.block_shape[1:])
        memory = self.groups[group]
        return memory.bytes.view(TORCH_DTYPES[layout.dtype]).view(memory.num_blocks, *shape)

    @property
    def blocks(self) -> torch.Tensor:
        """The kernels' view of the first group."""
        return self.kernel_view()

    @property
    def kernel_views(self) -> list[torch.Tensor]:
        """The kernels' view of each group."""
        return [self.kernel_view(group) for group in range(len(self.groups))]

    @property
    def num_bytes(self) -> int:
        """Bytes of all groups, on this rank."""
        return sum(group.num_blocks * group.block_bytes for group in self.groups)

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @property
    def kind(self) -> MemoryKind:
        return self.groups[0].kind

    def region(self) -> MemoryRegion:
        """Return the location of the first group's blocks."""
        return self.groups[0].region()

    @property
    def generations_addresses(self) -> list[int]:
        """The address of each group's generations."""
        return [group.generations_address for group in self.groups]


def words_of(blocks: torch.Tensor, layout: BlockLayout, field: int = 0) -> torch.Tensor:
    """View blocks, uint8 ``[n, block_bytes]``, as a field's words ``[n, layer, head, words]``: integers as wide as the
    layout allows, so that copies of them are fast."""
    heads = layout.heads_per_rank(field)
    rows = layout.rows(0, heads, field)
    words = blocks[:, rows.offset : rows.offset + rows.num_bytes].view(_WORDS[layout.word_bytes])
    return words.view(len(blocks), layout.num_layers, heads, -1)


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed host memory, of huge pages if there are any; a page is allocated at its first touch."""
    # Private instead of the default, shared: shared memory has huge pages only if the administrator enables them.
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


_libc = ctypes.CDLL(None, use_errno=True)


def check_available(num_bytes: int, option: str) -> None:
    """Raise :class:`ConfigError` for more host memory than the machine has available: the kernel would grant it, and
    end some process once it is touched. ``option``: the setting that asks for it."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(
            f"cannot allocate {_gib(num_bytes)} of KV memory: {_gib(available)} are available; lower {option}"
        )


def _populated_later(num_bytes: int) -> torch.Tensor:
    """Return zeroed host memory, uint8 ``[num_bytes]``, whose pages a thread allocates from now on."""
    check_available(num_bytes, "--kv-memory")
    flat = torch.frombuffer(anonymous_memory(num_bytes), dtype=torch.uint8)
    threading.Thread(target=populate, args=(flat,), name="populate-kv", daemon=True).start()
    return flat


def populate(memory: torch.Tensor) -> int:
    """Allocate all pages of ``memory`` (uint8, page-aligned), keeping their content; return the number of bytes done.

    The memory may be used meanwhile. If the kernel can't do that, pages are allocated at their first touch.
    """
    num_bytes = memory.numel()
    for start in range(0, num_bytes, POPULATE_CHUNK_BYTES):
        address = ctypes.c_void_p(memory.data_ptr() + start)
        size = ctypes.c_size_t(min(POPULATE_CHUNK_BYTES, num_bytes - start))
        if _libc.madvise(address, size, ctypes.c_int(_MADV_POPULATE_WRITE)):
            logger.debug(
                "pages of KV memory are allocated at first touch: madvise failed with errno %d", ctypes.get_errno()
            )
            return start
    return num_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
