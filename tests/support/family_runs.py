"""Runs of checkpoints in this process: greedy tokens in chunks, on one rank or on two that are threads."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitserve.kernels.reference import operations as reference
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.parallel.ranks import Alone, Collectives
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.models.weights.shard import Shard
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 8


def make_runner(
    path: Path, group: Collectives | None = None, *, config: ModelConfig | None = None, **options: Any
) -> ModelRunner:
    model = load_model(path, config or load_model_config(path), dtype=torch.float32, device=CPU, group=group, **options)
    local, dtype = model.config, options.get("kv_dtype", torch.float32)
    shape = (NUM_BLOCKS, *local.block_shape(BLOCK_SIZE))
    return ModelRunner(model, torch.full(shape, math.nan).to(dtype))


def greedy(runner: ModelRunner, prompt: list[int], budget: int, count: int) -> list[int]:
    """Tokens drawn after ``prompt``, computed in chunks of at most ``budget``."""
    tokens, num_computed = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        end = min(num_computed + budget, len(tokens))
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end == len(tokens) else None
        chunk = ScheduledChunk(tokens[num_computed:end], num_computed, range(NUM_BLOCKS), spec)
        (token,) = runner.run(StepPlan([chunk])).token_ids
        num_computed = end
        if token is not None:
            tokens.append(token)
    return tokens[len(prompt) :]


class Ranks:
    """Two ranks that are threads of this process."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.shown: list[Tensor] = [torch.empty(0)] * 2

    def exchange(self, rank: int, tensor: Tensor) -> Sequence[Tensor]:
        self.barrier.wait()
        self.shown[rank] = tensor.clone()
        self.barrier.wait()
        return list(self.shown)


class Rank(Alone):
    def __init__(self, rank: int, ranks: Ranks, *, has_whole_experts: bool = False) -> None:
        self.shard = Shard(rank, 2, has_whole_experts)
        self._ranks = ranks

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        first, second = self._ranks.exchange(self.shard.rank, parts.sum(0))
        residual.add_(first + second)
        return None if norm is None else reference.rms_norm(residual, norm, eps)

    def gather_columns(self, part: Tensor) -> Tensor:
        return torch.cat(tuple(self._ranks.exchange(self.shard.rank, part)), 1)


def tokens_of_two_ranks(
    path: Path, prompts: Sequence[list[int]], count: int, *, has_whole_experts: bool = False
) -> dict[int, list[list[int]]]:
    """Return the tokens that each of two ranks draws after each prompt."""
    ranks = Ranks()
    tokens: dict[int, list[list[int]]] = {}

    def run(rank: int) -> None:
        runner = make_runner(path, Rank(rank, ranks, has_whole_experts=has_whole_experts))
        tokens[rank] = [greedy(runner, prompt, 512, count) for prompt in prompts]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens
