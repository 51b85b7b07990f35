"""KV memory of one worker: allocated once, touched once, never moved."""

import mmap

import numpy as np
import numpy.typing as npt
import torch

from splitserve.errors import ConfigError
from splitserve.kvconnector.layout import DTYPE_BYTES, block_bytes, block_shape
from splitserve.memory_records import LayoutRecord, MemoryKind, MemoryRegion

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


class KVMemory:
    """The block tensor and its generations.

    ``blocks``: ``[num_blocks, layer, kv_head, 2, token, head_dim]``; ``generations``: uint64 ``[num_blocks]``, on
    the host.
    ``device``: where the blocks are; generations are on the host always.
    CPU memory asks for huge pages: a peer's copy walks pages, and with 4 KiB ones the walk costs as much as the copy.
    """

    def __init__(self, layout: LayoutRecord, num_blocks: int, device: torch.device | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV memory is smaller than one block of {block_bytes(layout)} bytes; raise --kv-memory")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes(layout)
        num_bytes = num_blocks * self.block_bytes
        try:
            if device is None or device.type == "cpu":
                flat = torch.frombuffer(anonymous_memory(num_bytes), dtype=torch.uint8)
            else:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise ConfigError(f"KV memory of {num_bytes / 2**30:.1f} GiB can't be had; lower --kv-memory") from error
        flat.zero_()  # first touch: pages are ours before a peer or a step needs them
        self.blocks = flat.view(TORCH_DTYPES[layout.dtype]).view(num_blocks, *block_shape(layout))
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            anonymous_memory(num_blocks * 8), dtype=np.uint64, count=num_blocks
        )

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.VRAM if self.blocks.is_cuda else MemoryKind.DRAM

    def region(self) -> MemoryRegion:
        """Where the blocks are, for peers that read them."""
        return MemoryRegion(
            kind=self.kind,
            device_id=self.device.index or 0,
            blocks_address=self.blocks.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
        )

    @property
    def generations_address(self) -> int:
        return int(self.generations.ctypes.data)


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed host memory, of huge pages where there are any."""
    buffer = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
