"""Runs of checkpoints in this process: greedy tokens in chunks, on one rank or on two that are threads."""

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
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
    path: Path,
    group: Collectives | None = None,
    *,
    config: ModelConfig | None = None,
    num_prompts: int = 1,
    **options: Any,
) -> ModelRunner:
    """Make a runner with room for ``num_prompts`` sequences at a time."""
    model = load_model(path, config or load_model_config(path), dtype=torch.float32, device=CPU, group=group, **options)
    local, dtype = model.config, options.get("kv_dtype", torch.float32)
    shape = (NUM_BLOCKS * num_prompts, *local.block_shape(BLOCK_SIZE))
    return ModelRunner(model, torch.full(shape, math.nan).to(dtype))


def draws(runner: ModelRunner, prompt: list[int], budget: int) -> Iterator[int]:
    """The tokens drawn after ``prompt``, one after another, computed in chunks of at most ``budget``."""
    tokens, num_computed = list(prompt), 0
    while True:
        end = min(num_computed + budget, len(tokens))
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end == len(tokens) else None
        chunk = ScheduledChunk(tokens[num_computed:end], num_computed, range(NUM_BLOCKS), spec)
        (token,) = runner.run(StepPlan([chunk])).token_ids
        num_computed = end
        if token is not None:
            tokens.append(token)
            yield token


def greedy(runner: ModelRunner, prompt: list[int], budget: int, count: int) -> list[int]:
    """Tokens drawn after ``prompt``, computed in chunks of at most ``budget``."""
    return list(islice(draws(runner, prompt, budget), count))


def greedy_together(
    runner: ModelRunner, prompts: Sequence[list[int]], budget: int, counts: Sequence[int]
) -> list[list[int]]:
    """Tokens drawn after each of ``prompts``, so many as ``counts`` says, in steps with a chunk of each."""
    tokens, num_computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    ends = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    while running := [index for index, end in enumerate(ends) if len(tokens[index]) < end]:
        chunks = []
        for index in running:
            start, known = num_computed[index], len(tokens[index])
            num_computed[index] = end = min(start + budget, known)
            spec = SampleSpec(0.0, 0, 1.0, 0, 0, end) if end == known else None
            blocks = range(NUM_BLOCKS * index, NUM_BLOCKS * (index + 1))
            chunks.append(ScheduledChunk(tokens[index][start:end], start, blocks, spec))
        for index, token in zip(running, runner.run(StepPlan(chunks)).token_ids, strict=True):
            if token is not None:
                tokens[index].append(token)
    return [found[len(prompt) :] for found, prompt in zip(tokens, prompts, strict=True)]


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
        group = Rank(rank, ranks, has_whole_experts=has_whole_experts)
        runner = make_runner(path, group, num_prompts=len(prompts))
        tokens[rank] = greedy_together(runner, prompts, 512, [count] * len(prompts))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens
