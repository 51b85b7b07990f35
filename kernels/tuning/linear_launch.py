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
        # Whole rows: all of a program's weights are in flight before it waits.
        block_k = min(_ROW_BLOCK, triton.next_power_of_2(in_features))
        default = LinearLaunch(block_m=1, block_n=2 if variant == "gated" else 4, block_k=block_k)
    else:
        few = LinearLaunch(block_k=_TILE_ROW_BYTES // dtype.itemsize)
        default = few if num_rows <= _FEW_ROWS else CUBLAS
    return tuned(default, f"linear_{variant}", shape_key(dtype, n=out_features, k=in_features), num_rows)
