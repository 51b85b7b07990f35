"""Launch parameters of products of a few rows: tuned (:mod:`.parameters`), else a default."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from splitserve.kernels.tuning.parameters import shape_key, tuned, until_changed

Variant = Literal["plain", "add", "norm", "gated"]

_FEW_ROWS = 16
_ROW_BLOCK = 4096
_TILE_ROW_BYTES = 512  # of each weight row of a tile: its stages share the memory of a program


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Launch parameters of a product. The defaults suit few rows of any shape in 16 bits."""

    block_m: int = 16  # 0: cuBLAS; 1: the kernel for one row
    block_n: int = 32  # outputs
    block_k: int = 256
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0  # elements of each of the tile's weight rows, a power of two
    tma: bool = False  # the bulk copy engine (compute capability 9.0) loads the weights
    joined: bool = True  # the product's own kernel sums its parts, even if the consumer kernel could

    @property
    def leaves_parts(self) -> bool:
        return not self.joined and self.split_k > 1 and self.block_m > 1


CUBLAS = LinearLaunch(block_m=0)


@until_changed
def launch_params(
    variant: Variant, dtype: torch.dtype, out_features: int, in_features: int, num_rows: int
) -> LinearLaunch:
    """Return the tuned parameters, else a default: the kernels of :mod:`splitserve.kernels.triton.linear` for few rows,
    cuBLAS for more."""
    if num_rows == 1:
        default = _of_one_row(variant, in_features)
    else:
        few = LinearLaunch(block_k=_TILE_ROW_BYTES // dtype.itemsize)
        default = few if num_rows <= _FEW_ROWS else CUBLAS
    return tuned(default, f"linear_{variant}", shape_key(dtype, n=out_features, k=in_features), num_rows)


def _of_one_row(variant: Variant, in_features: int) -> LinearLaunch:
    """Return the default for one row: whole weight rows, so that all of a program's weights are in flight before it
    waits. Long rows are read in blocks. If these would have more than a quarter of the row as padding, blocks are
    smaller, like those that tuning found for such rows on an H200."""
    block_n, block_k = 4, min(_ROW_BLOCK, triton.next_power_of_2(in_features))
    if in_features > _ROW_BLOCK and 4 * (-in_features % block_k) > in_features:
        sizes = (size for size in (2048, 1024) if 16 * (-in_features % size) <= in_features)
        block_k = next(sizes, 512)
        block_n = min(8, 8192 // block_k)
    return LinearLaunch(block_m=1, block_n=block_n // 2 if variant == "gated" else block_n, block_k=block_k)
