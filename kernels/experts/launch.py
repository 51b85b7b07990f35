"""Launch parameters of mixtures of experts: tuned (:mod:`splitserve.kernels.tuning.parameters`), else a default."""

from dataclasses import dataclass

import torch

from splitserve.kernels.tuning.parameters import shape_key, tuned

OPERATION = "experts"
_FEW_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """Launch parameters of both products of a layer's experts."""

    block_m: int = 16  # pairs of a tile; 1: a program for each pair, without sorting
    block_n: int = 32  # outputs of gate and of up
    block_k: int = 128
    down_block_n: int = 64
    down_block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3


def experts_key(dtype: torch.dtype, *, num_experts: int, top_k: int, hidden_size: int, inner_size: int) -> str:
    """Return the key of a layer's shape; ``dtype``: of the weights."""
    return shape_key(dtype, experts=num_experts, top_k=top_k, hidden=hidden_size, inner=inner_size)


def expert_launch(key: str, *, num_experts: int, top_k: int, num_tokens: int) -> ExpertLaunch:
    """Return the tuned parameters, else a default: tiles about as high as an expert has pairs on average."""
    if num_tokens <= _FEW_TOKENS:
        default = ExpertLaunch(block_m=1, block_n=4, block_k=1024, down_block_n=8, down_block_k=1024)
    else:
        average = num_tokens * top_k // num_experts
        default = ExpertLaunch()
        if average > 16:
            default = ExpertLaunch(32, 64, 64, 128, 64)
        if average > 64:
            default = ExpertLaunch(128, 64, 64, 128, 64, num_warps=8)
    return tuned(default, OPERATION, key, num_tokens)
