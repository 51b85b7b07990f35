"""Rows that an all-reduce has normalised reach the products that follow, which then don't normalise them again."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from splitserve.kernels.api import Linear
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.kernels.sampling import SamplingBatch
from splitserve.models.config import load_model_config
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.parallel.ranks import Alone, RowParallelLinear
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BLOCK_SIZE = 16
# Per step, of each chunk: its tokens, how many there were before, and whether a token is drawn.
STEPS = [[(5, 0, True), (4, 0, True)], [(1, 5, True), (3, 4, False)], [(1, 6, True)], [(4, 7, True)]]


class Normalising(Alone):
    """One rank, whose all-reduce normalises where it may."""

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        residual.add_(parts.sum(0))
        return None if norm is None else reference.rms_norm(residual, norm, eps)


def run_steps(path: Path, group: Alone) -> tuple[list[Tensor], list[int]]:
    """Logits, and how often a product normalised its rows, of each of :data:`STEPS`."""
    logits: list[Tensor] = []
    num_norms = [0]

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_norms[-1] += 1
        return reference.rms_norm(x, weight, eps)

    def sample(rows: Tensor, batch: SamplingBatch) -> Tensor:
        logits.append(rows.clone())
        return rows.argmax(1)

    kernels = select_kernels(CPU, torch.float32, dict.fromkeys(OPERATIONS, "reference"))
    pack_linear = partial(PlainLinear, rms_norm=rms_norm, silu_mul=reference.silu_mul)
    config = load_model_config(path)
    kernels = replace(kernels, sample=sample, pack_linear=pack_linear)
    model = load_model(path, config, dtype=torch.float32, device=CPU, kernels=kernels)
    for layer in model.decoder.layers:
        assert isinstance(layer, LlamaLayer)
        for projection in (layer.attention.output, layer.mlp.down):
            projection.linear = RowParallelLinear(cast(Linear, projection.linear), group)
    shape = (4, config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    runner = ModelRunner(model, torch.zeros(shape))
    for step in STEPS:
        chunks = []
        for index, (count, before, draws) in enumerate(step):
            spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=before + count)
            tokens = [300 + 7 * index + before + at for at in range(count)]
            chunks.append(ScheduledChunk(tokens, before, [index], spec if draws else None))
        runner.run(StepPlan(chunks))
        num_norms.append(0)
    return logits, num_norms[:-1]


def test_the_logits_stay_and_the_norms_go(tiny_qwen3: Path) -> None:
    expected, num_norms = run_steps(tiny_qwen3, Alone())
    num_layers = load_model_config(tiny_qwen3).num_layers
    assert num_norms == [2 * num_layers + 1] * len(STEPS)
    actual, num_norms = run_steps(tiny_qwen3, Normalising())
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    # Left is the first norm; where one row is drawn from, the last layer's two others; for one row all of them.
    assert num_norms == [1, 3, 2 * num_layers + 1, 3]
