"""The simulator's model with the production sampler: logits follow from KV, tokens from logits and sampling features.

So the states of features go through all that happens to requests: other workers, preemption, steps in flight.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.reference.sampling import sample
from splitserve.models.runner.runner import output_of_step
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import wanted_features
from splitserve.protocol.step import Draw, FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan
from splitserve.simulation.model import VOCAB, mix, output_of

_CPU = torch.device("cpu")
_SPREAD = 2.0  # standard deviation of logits


class SampledHead:
    """One worker's sampler."""

    def __init__(self, model_dir: Path) -> None:
        self._sampler = Sampler(sample, VOCAB, _CPU, model_dir)
        self._drawn: dict[int, int] = {}  # tokens of the last step, by chunk

    @torch.inference_mode()
    def draw(self, plan: StepPlan, read: Mapping[int, Sequence[int]]) -> list[Draw | None]:
        """See :meth:`splitserve.simulation.model.Head.draw`."""
        self._sampler.prepare(plan)
        before, self._drawn = self._drawn, {}
        if not read:
            return [None] * len(plan.chunks)
        logits = torch.stack([_logits(mix(*kv)) for kv in read.values()])
        drawn = self._sampler.draw(logits, plan.chunks, lambda: before)
        draws = list(output_of_step(plan, drawn.numpy(), None, self._sampler.errors).draws)
        self._drawn = {index: draw.token_id for index, draw in enumerate(draws) if draw is not None}
        return draws


class SampledModel:
    """Draws as a worker does, over a vocabulary of a few tokens. ``model_dir``: the directory of its tokenizer.json."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._reference = SampledHead(model_dir)

    def new_head(self) -> SampledHead:
        """See :meth:`splitserve.simulation.model.Model.new_head`."""
        return SampledHead(self._model_dir)

    def expected_output(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """See :meth:`splitserve.simulation.model.Model.expected_output`: features' states are made for each draw anew,
        from the request and its output."""
        return output_of(prompt, sampling, lambda kv, output: self._draw_alone(kv, prompt, output, sampling))

    def _draw_alone(self, kv: list[int], prompt: list[int], output: list[int], params: SamplingParams) -> int:
        use = FeatureUse(1, FeatureStart(params, prompt, output)) if wanted_features(params) else None
        position = len(prompt) + len(output)
        spec = SampleSpec(params.temperature, params.top_k, params.top_p, params.seed, params.choice, position, use)
        chunk = ScheduledChunk([(prompt + output)[-1]], position - 1, [0], spec)
        [draw] = self._reference.draw(StepPlan([chunk]), {0: kv})
        assert draw is not None and not draw.error, f"an undisturbed worker can't draw: {draw}"
        return draw.token_id


@lru_cache(maxsize=4096)
def _logits(content: int) -> Tensor:
    numbers = np.random.default_rng(content).standard_normal(VOCAB, dtype=np.float32)
    return torch.from_numpy(numbers * np.float32(_SPREAD))
