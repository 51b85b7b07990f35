"""Launch parameters of mixtures of experts: tuned (:mod:`splitserve.kernels.tuning.parameters`), else a default."""

import functools
from dataclasses import dataclass, replace
from math import inf

import torch

from splitserve.kernels.fp8.weight import GROUP as FP8_GROUP
from splitserve.kernels.tuning.parameters import shape_key, tuned

OPERATION = "experts"
MAX_STREAMED = 8
"""The most pairs of a tile in bfloat16 for the kernels of :mod:`splitserve.kernels.experts.triton.streamed`."""


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """Launch parameters of both products of a layer's experts.

    Where the kernels of :mod:`splitserve.kernels.experts.triton.streamed` run, ``block_k`` has no effect, and
    ``num_stages`` are blocks of 128 elements that are loaded ahead.
    """

    block_m: int = 16  # pairs of a tile; 1: a program for each pair, without sorting
    block_n: int = 32  # outputs: as many rows of gate, and as many of up
    block_k: int = 128
    down_block_n: int = 64
    down_block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3
    # Of the second product with weights in MXFP4 alone:
    down_num_warps: int = 0  # 0: as the first product
    down_num_stages: int = 0  # likewise
    down_split_k: int = 1  # programs that share a row's elements; the sum over choices adds up their parts


@dataclass(frozen=True, slots=True)
class _Defaults:
    few_tokens: int  # for which pairs are not sorted
    pairs: ExpertLaunch
    tiles: tuple[tuple[float, ExpertLaunch], ...]  # with the most pairs of an expert, on average


_PAIRS = ExpertLaunch(1, 4, 1024, 2, 1024)
_PLAIN = _Defaults(  # measured on an H200: docs/decisions/049
    2,
    _PAIRS,
    (
        (11, ExpertLaunch(16, 64, 128, 128, 128, 4, 4)),
        (24, ExpertLaunch(32, 64, 128, 128, 128, 4, 4)),
        (48, ExpertLaunch(64, 128, 64, 256, 64, 8, 4)),
        (inf, ExpertLaunch(128, 128, 64, 256, 64, 8, 4)),
    ),
)
_FLOAT32 = _Defaults(  # whose products are no matrix instructions
    4,
    _PAIRS,
    (
        (16, ExpertLaunch(16, 16, 128, 64, 128)),
        (64, ExpertLaunch(32, 32, 64, 128, 64)),
        (inf, ExpertLaunch(128, 32, 64, 128, 64, 8)),
    ),
)
_FP8 = _Defaults(  # tiles measured on an H200: docs/decisions/043
    4,
    _PAIRS,
    (
        (16, ExpertLaunch(16, 64, 128, 256, 128, 8, 3)),
        (48, ExpertLaunch(32, 64, 128, 128, 128, 4, 4)),
        (inf, ExpertLaunch(64, 64, 128, 128, 128, 4, 4)),
    ),
)
_PACKED = _Defaults(
    8,
    ExpertLaunch(1, 8, 128, 16, 128, 1, down_split_k=2),
    (
        (16, ExpertLaunch(16, 64, 128, 128, 128)),
        (64, ExpertLaunch(32, 64, 128, 128, 128)),
        (inf, ExpertLaunch(64, 128, 128, 256, 128, 8)),
    ),
)
_BY_DTYPE = {torch.float32: _FLOAT32, torch.float8_e4m3fn: _FP8, torch.uint8: _PACKED}


def experts_key(dtype: torch.dtype, *, num_experts: int, top_k: int, hidden_size: int, inner_size: int) -> str:
    """Return the key of a layer's shape; ``dtype``: of the weights."""
    return shape_key(dtype, experts=num_experts, top_k=top_k, hidden=hidden_size, inner=inner_size)


def expert_launch(
    key: str,
    *,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    dtype: torch.dtype,
    down_dtype: torch.dtype,
    device: torch.device,
) -> ExpertLaunch:
    """Return the tuned parameters, else a default: tiles higher than an expert's average number of pairs.

    ``dtype``, ``down_dtype``: of the weights of both products; uint8 stands for MXFP4. Of tiles of other weights,
    parameters that ``device`` has no room for are changed to the next that fit.
    """
    defaults = _BY_DTYPE.get(dtype, _PLAIN)
    average = num_tokens * top_k // num_experts
    if num_tokens <= defaults.few_tokens:
        default = defaults.pairs
    else:
        default = next(launch for most, launch in defaults.tiles if average <= most)
    launch = tuned(default, OPERATION, key, num_tokens)
    if launch.block_m == 1 or dtype == torch.uint8:
        return launch
    return fitted(launch, dtype, down_dtype, shared_memory(device))


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared memory of a program on a device."""

    num_bytes: int
    has_operands: bool = (
        True  # instructions of four warps read theirs there: since Hopper, for tiles of 64 rows or more
    )


@functools.cache
def fitted(launch: ExpertLaunch, dtype: torch.dtype, down_dtype: torch.dtype, memory: SharedMemory) -> ExpertLaunch:
    """Return the parameters, or those nearest to them with which the sums of a tile fit into registers, and the rows
    that are loaded ahead into shared memory. ``dtype``, ``down_dtype``: of the weights of both products, which differ
    where a rank's share of the inner size is not whole groups of FP8."""

    def excess(product: int) -> int:
        return _loaded_bytes(launch, dtype, down_dtype, has_operands=memory.has_operands)[product] - memory.num_bytes

    while launch.block_n > 16 and 2 * launch.block_n * launch.block_m > _most_sums(launch, dtype):
        launch = replace(launch, block_n=launch.block_n // 2)
    while launch.down_block_n > 16 and launch.down_block_n * launch.block_m > _most_sums(launch, down_dtype):
        launch = replace(launch, down_block_n=launch.down_block_n // 2)
    while launch.num_stages > 2 and max(excess(0), excess(1)) > 0:
        launch = replace(launch, num_stages=launch.num_stages - 1)
    while launch.block_k > 16 and excess(0) > 0:
        launch = replace(launch, block_k=launch.block_k // 2)
    while launch.down_block_k > 16 and excess(1) > 0:
        launch = replace(launch, down_block_k=launch.down_block_k // 2)
    return launch


def _most_sums(launch: ExpertLaunch, dtype: torch.dtype) -> int:
    # With scales each thread has a second sum, of the group at hand
    return 32 * launch.num_warps * (64 if dtype == torch.float8_e4m3fn else 128)


def _loaded_bytes(
    launch: ExpertLaunch, dtype: torch.dtype, down_dtype: torch.dtype, *, has_operands: bool
) -> tuple[int, int]:
    """Return the bytes that each of the two products has in shared memory."""
    # Instructions of a warp, for tiles below 64 rows, have their operands in registers when they begin
    num_blocks = launch.num_stages - (launch.block_m < 64 or not has_operands)
    row_bytes, down_row_bytes = (
        FP8_GROUP if each == torch.float8_e4m3fn else block_k * each.itemsize
        for each, block_k in ((dtype, launch.block_k), (down_dtype, launch.down_block_k))
    )
    gate_up_rows, down_rows = launch.block_m + 2 * launch.block_n, launch.block_m + launch.down_block_n
    return num_blocks * gate_up_rows * row_bytes, num_blocks * down_rows * down_row_bytes


@functools.cache
def shared_memory(device: torch.device) -> SharedMemory:
    """Return the shared memory that a program can have on ``device``."""
    if device.type != "cuda":
        return SharedMemory(1 << 40)  # Triton's interpreter
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    num_bytes: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return SharedMemory(num_bytes, has_operands=torch.cuda.get_device_capability(index) >= (9, 0))
