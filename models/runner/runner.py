"""The model runner: a :class:`StepPlan` in, drawn tokens out. One runner for all roles.

``run`` is: build the step's tensors, forward, sample. Building touches no device memory but its own inputs, so that a
later split into launch and wait can build the next step while this one runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.common.errors import SplitserveError
from splitserve.kernels.windows import slots_of_groups
from splitserve.models.decoder import ForwardBatch, RunnableModel
from splitserve.models.layers.step import BeforeLayer
from splitserve.models.runner.cache import RunnerCache
from splitserve.models.sampling.feature import LogitKernels
from splitserve.models.sampling.logprobs import PromptRows, StepScores
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.step import Draw, LaunchingRunner, ScheduledChunk, StepOutput, StepPlan, draws_of

Int64Array: TypeAlias = npt.NDArray[np.int64]


class NonFiniteLogitsError(SplitserveError):
    """A step's logits hold NaN or infinity: no token can be drawn. ``chunk_indices`` are the chunks concerned."""

    def __init__(self, chunk_indices: tuple[int, ...]) -> None:
        self.chunk_indices = chunk_indices
        super().__init__(
            f"logits of chunks {list(chunk_indices)} hold no finite maximum: the weights overflow in this dtype "
            "or the KV memory is damaged; try --dtype float32"
        )


class ModelRunner:
    """Runs steps of ``model`` over ``kv_cache``.

    ``kv_cache``: contiguous ``[num_blocks, num_layers, num_kv_heads, 2 (K/V), block_size, head_dim]``, or of latents
    ``[num_blocks, num_layers, block_size, width]``, on the model's device and of its dtype, or float8_e4m3fn where the
    model's attention reads that. There's one for each group of the model's cache
    (:mod:`splitserve.models.cache_groups`), or a single one for all layers. They belong to the caller; the runner
    writes only the slots of scheduled tokens. ``model_dir``: the checkpoint's, for structured output.
    """

    def __init__(
        self, model: RunnableModel, kv_cache: Tensor | Sequence[Tensor], *, model_dir: Path | None = None
    ) -> None:
        self.model = model
        self.cache = RunnerCache.of(model, kv_cache)
        self.block_size = self.cache.block_size
        self.sampler = Sampler(
            model.kernels.sample,
            model.config.vocab_size,
            model.device,
            model_dir,
            is_lead=model.is_lead,
            logit_kernels=LogitKernels(model.kernels.mask_logits, model.kernels.penalise_logits),
            score_tokens=model.kernels.score_tokens,
        )

    @property
    def launcher(self) -> LaunchingRunner | None:
        """Return this runner if its device runs launched steps by itself; None if steps run on the calling thread."""
        return None

    @property
    def depends_on_sizes(self) -> bool:
        """Return whether kernels are chosen or compiled for a step's sizes: a start then runs each kind of size."""
        return False

    def check_device(self) -> None:
        """Raise an error if the device can run no further step."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Computes the step and waits for it. KV of every scheduled token is in ``kv_cache`` when it returns.

        Raises :class:`NonFiniteLogitsError`; then no token of the step may be used.
        """
        self.sampler.prepare(plan)
        self.cache.copy_blocks(plan.chunks)
        prompts = self._prompts(plan)
        logits = self._forward(self._batch(plan.chunks, prompts))
        drawn = None if logits is None else self.sampler.draw(logits, plan.chunks)
        numbers, scores = self._results(drawn, prompts)
        return output_of_step(plan, numbers.cpu().numpy(), scores, {} if drawn is None else self.sampler.errors)

    @torch.inference_mode()
    def logits(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Compute a step, and return logits [R, vocab] of the chunks that draw; None if there are none."""
        return self._forward(self._batch(chunks))

    def _prompts(self, plan: StepPlan) -> PromptRows | None:
        model = self.model
        return PromptRows.of(plan.chunks, model.device, model.kernels.score_tokens, is_lead=model.is_lead)

    def _forward(self, batch: ForwardBatch, before_layer: BeforeLayer | None = None) -> Tensor | None:
        return self.model.forward(batch, self.cache.kv_layers, self.cache.attention, before_layer)

    def _results(self, drawn: Tensor | None, prompts: PromptRows | None) -> tuple[Tensor, StepScores | None]:
        """Return the results as an int64 tensor for :func:`output_of_step`, and what follows the drawn tokens."""
        if drawn is None:
            drawn, raw = torch.empty(0, dtype=torch.int64, device=self.model.device), None
        else:
            raw = self.sampler.raw
        if not self.model.is_lead or (raw is None and prompts is None):
            return drawn, None
        scores = StepScores(raw, prompts)
        return torch.cat((drawn, *scores.packed(drawn))), scores

    def _batch(self, chunks: Sequence[ScheduledChunk], prompts: PromptRows | None = None) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slot_blocks: list[list[int]] = [[] for _ in self.cache.groups]
        sample_rows: list[int] = []
        size = self.block_size
        for chunk in chunks:
            token_ids.extend(chunk.token_ids)
            numbers = range(chunk.start, chunk.start + len(chunk.token_ids))
            positions.extend(numbers)
            slot_blocks[0].extend(chunk.block_ids[position // size] for position in numbers)
            for blocks, table in zip(slot_blocks[1:], chunk.other_tables, strict=True):
                blocks.extend(table.block_ids[position // size - table.first_number] for position in numbers)
            if chunk.sample is not None:
                sample_rows.append(len(token_ids) - 1)
        if prompts is not None:
            sample_rows.extend(prompts.rows)
        flat = torch.tensor([token_ids, positions, *slot_blocks]).to(self.model.device)
        return ForwardBatch(
            tokens=self.model.tokens(flat[0], flat[1], slots_of_groups(self.cache.shapes, flat[2:], flat[1])),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=self.model.device),
            attention_plan=self.cache.attention.plan(self.cache.batches(chunks)),
            scored=prompts,
        )


def output_of_step(
    plan: StepPlan, numbers: Int64Array, scores: StepScores | None, errors: Mapping[int, str]
) -> StepOutput:
    """Return a step's output from the numbers that came from the device: a token for each draw, then ``scores``.

    ``errors``: of draws, by row. Raises :class:`NonFiniteLogitsError`.
    """
    num_own = sum([chunk.sample is not None for chunk in plan.chunks])
    sampled = [index for index, _ in draws_of(plan.chunks)]
    drawn = numbers[: len(sampled)].tolist()
    if failed := tuple(index for index, token in zip(sampled, drawn, strict=True) if token < 0):
        raise NonFiniteLogitsError(failed)
    of_draws: Mapping[int, Logprobs] = {}
    of_prompts: Mapping[int, Logprobs] = {}
    if scores is not None:
        of_draws, of_prompts = scores.read(numbers[len(sampled) :])
        if failed := tuple(index for index, logprobs in of_prompts.items() if not logprobs.is_finite()):
            raise NonFiniteLogitsError(failed)
    by_row = [
        Draw((0,), error=errors[row]) if row in errors else Draw((token,), of_draws.get(row))
        for row, token in enumerate(drawn)
    ]
    draws: list[Draw | None] = [None] * len(plan.chunks)
    for index, draw in zip(sampled[:num_own], by_row, strict=False):
        others = [other for chunk, other in zip(sampled[num_own:], by_row[num_own:], strict=True) if chunk == index]
        draws[index] = msgspec.structs.replace(draw, others=tuple(others)) if others else draw
    return StepOutput(draws, of_prompts)
