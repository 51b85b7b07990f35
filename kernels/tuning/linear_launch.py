"""Launch parameters of products of a few rows: tuned (:mod:`.parameters`), else a default."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from splitserve.kernels.tuning.parameters import shape_key, tuned, until_changed

Variant = Literal["plain", "add", "norm", "gated"]

_FEW_ROWS = 16
_ROW_BLOCK = 4096
_TILE_ROW_BYTES = 512  # of each weight row of a tile: its stages share the memory of a program
_MOST_PARTS = 6
_LEAST_OF_PART = 512  # inputs
_WIDE_GAIN = 1.5  # least ratio of programs, wide to narrow, at which wide tiles are taken
_ROW_BYTES_OF_TMA = 16  # a weight's rows must be whole multiples of it
_SHARED_BYTES = 200_000  # that the tiles for TMA take at most


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Launch parameters of a product. The defaults suit few rows of any shape in 16 bits, on any device."""

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


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles whose weights the bulk copy engine loads."""

    gated: LinearLaunch
    narrow: LinearLaunch
    wide: LinearLaunch
    many: LinearLaunch  # of products with more narrow tiles than there are multiprocessors


def _tile(block_m: int, block_n: int, block_k: int, num_stages: int) -> LinearLaunch:
    return LinearLaunch(block_m, block_n, block_k, num_stages=num_stages, prefetch=128, tma=True)


_TILES = {  # by the most rows; measured on an H200: docs/decisions/048
    16: _Tiles(_tile(16, 64, 256, 3), _tile(16, 64, 256, 4), _tile(16, 128, 128, 5), _tile(16, 32, 256, 4)),
    32: _Tiles(_tile(32, 64, 128, 4), _tile(32, 64, 128, 6), _tile(32, 128, 128, 4), _tile(32, 128, 128, 4)),
    64: _Tiles(_tile(64, 128, 64, 4), _tile(64, 64, 128, 5), _tile(64, 128, 128, 4), _tile(64, 128, 128, 4)),
}


@until_changed
def launch_params(
    variant: Variant, dtype: torch.dtype, out_features: int, in_features: int, num_rows: int
) -> LinearLaunch:
    """Return the tuned parameters, else a default: the kernels of :mod:`splitserve.kernels.triton.linear` for few rows,
    cuBLAS for more."""
    default = default_params(variant, dtype, out_features, in_features, num_rows, num_processors=multiprocessors())
    key = shape_key(dtype, n=out_features, k=in_features)
    return tuned(default, f"linear_{variant}", key, num_rows, base=LinearLaunch())


def default_params(
    variant: Variant,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    num_rows: int,
    *,
    num_processors: int,
) -> LinearLaunch:
    """Return the parameters of a product that nobody tuned.

    ``num_processors``: the multiprocessors that share the work, each with a bulk copy engine and room for the tiles
    here; 0 if the device has none like that.
    """
    if num_processors and dtype.itemsize == 2:
        launch = _of_tiles(variant, out_features, in_features, num_rows, num_processors)
        if launch is not None:
            return launch
    if num_rows == 1:
        return _of_one_row(variant, dtype, in_features)
    return LinearLaunch(block_k=_TILE_ROW_BYTES // dtype.itemsize) if num_rows <= _FEW_ROWS else CUBLAS


def _of_tiles(
    variant: Variant, out_features: int, in_features: int, num_rows: int, num_processors: int
) -> LinearLaunch | None:
    """Return the parameters for tiles of weights in 16 bits; None where others are better, or
    where the weight has no room for one."""
    is_gated = variant == "gated"
    # A single row mostly has a kernel of its own, but gates of more inputs than it takes at a time are slower there.
    if num_rows == 1 and not (is_gated and in_features > _ROW_BLOCK):
        return None
    tiles = next((tiles for most, tiles in _TILES.items() if num_rows <= most), None)
    if tiles is None or 2 * in_features % _ROW_BYTES_OF_TMA:
        return None
    launch = tiles.gated if is_gated else _spread(tiles, out_features, in_features, num_processors)
    has_whole_tile = launch.block_n * (1 + is_gated) <= out_features and launch.block_k <= in_features
    return launch if has_whole_tile else None


def _spread(tiles: _Tiles, out_features: int, in_features: int, num_processors: int) -> LinearLaunch:
    """Return tiles that keep nearly all multiprocessors busy to the end.

    Programs of these tiles have a multiprocessor each. Where outputs make fewer tiles than that, several programs
    share a tile's inputs, and leave their parts to the consumer kernel.
    """
    if triton.cdiv(out_features, tiles.narrow.block_n) > num_processors:
        return tiles.many

    def shared(launch: LinearLaunch) -> tuple[LinearLaunch, int]:
        columns = triton.cdiv(out_features, launch.block_n)
        split = max(1, min(num_processors // columns, _MOST_PARTS, in_features // _LEAST_OF_PART))
        blocks = triton.cdiv(in_features, launch.block_k)
        split = triton.cdiv(blocks, triton.cdiv(blocks, split))  # parts are whole blocks, and none is empty
        return replace(launch, split_k=split, joined=split == 1), split * columns

    narrow, num_narrow = shared(tiles.narrow)
    wide, num_wide = shared(tiles.wide)
    return wide if num_wide >= _WIDE_GAIN * num_narrow else narrow


def _of_one_row(variant: Variant, dtype: torch.dtype, in_features: int) -> LinearLaunch:
    """Return the parameters for one row: whole weight rows, so that all of a program's weights are in flight before it
    waits; long ones in blocks."""
    if in_features <= _ROW_BLOCK or dtype.itemsize == 1:
        block_k = min(_ROW_BLOCK, triton.next_power_of_2(in_features))
        return LinearLaunch(block_m=1, block_n=2 if variant == "gated" else 4, block_k=block_k)
    if variant == "gated":
        return LinearLaunch(block_m=1, block_n=4, block_k=1024, num_warps=2)
    return LinearLaunch(block_m=1, block_n=8, block_k=2048) if variant == "norm" else LinearLaunch(1, 4, 1024)


@functools.cache
def multiprocessors() -> int:
    """Return how many multiprocessors the current device has if they suit the tiles here (:func:`default_params`), else
    0."""
    if not torch.cuda.is_available():
        return 0
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(torch.cuda.current_device())
    suits = torch.cuda.get_device_capability() >= (9, 0) and properties["max_shared_mem"] >= _SHARED_BYTES
    return int(properties["multiprocessor_count"]) if suits else 0
