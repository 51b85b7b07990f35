"""Launch parameters of mixtures of experts: tuned (:mod:`splitserve.kernels.tuning.parameters`), else a default."""

from dataclasses import dataclass
from math import inf

import torch

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
    block_n: int = 32  # outputs of gate and of up
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


_PLAIN = _Defaults(
    4,
    ExpertLaunch(1, 4, 1024, 2, 1024),
    ((16, ExpertLaunch()), (64, ExpertLaunch(32, 64, 64, 128, 64)), (inf, ExpertLaunch(128, 64, 64, 128, 64, 8))),
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


def experts_key(dtype: torch.dtype, *, num_experts: int, top_k: int, hidden_size: int, inner_size: int) -> str:
    """Return the key of a layer's shape; ``dtype``: of the weights."""
    return shape_key(dtype, experts=num_experts, top_k=top_k, hidden=hidden_size, inner=inner_size)


def expert_launch(key: str, *, num_experts: int, top_k: int, num_tokens: int, is_packed: bool) -> ExpertLaunch:
    """Return the tuned parameters, else a default: tiles about as high as an expert has pairs on average.

    ``is_packed``: the weights are in MXFP4.
    """
    defaults = _PACKED if is_packed else _PLAIN
    average = num_tokens * top_k // num_experts
    if num_tokens <= defaults.few_tokens:
        default = defaults.pairs
    else:
        default = next(launch for most, launch in defaults.tiles if average <= most)
    return tuned(default, OPERATION, key, num_tokens)
