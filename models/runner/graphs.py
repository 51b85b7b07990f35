"""Captured CUDA graphs of steps, with the tensors that a replay reads and writes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.windows import FixedLayerPlans, MixedLayerPlans
from splitserve.models.runner.graph_sizes import MixedSize


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One captured batch size."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64 [3 + N, S]: tokens, positions, rows of drawn tokens, blocks to write of N groups
    plan: FixedLayerPlans
    logits: Tensor


@dataclass(slots=True)
class MixedGraph:
    """A captured step of S tokens."""

    size: MixedSize
    parts: dict[int, torch.cuda.CUDAGraph]  # replayed in this order, by the first layer of each
    inputs: Tensor  # int64 [(3 + N) * S + R]: those of :class:`DecodeGraph`, then the rows to sample
    plan: MixedLayerPlans
    logits: Tensor  # [R, vocab], shared by all mixed graphs
    least_tokens: int = 1  # steps with fewer prefill tokens are quicker without it
