"""The draw of a step's tokens: raw logits, sampling features, then temperature, top-k, top-p and the draw itself.

Every rank of a worker does the same. States of features are kept by the id that the plan names them by; a step may be
launched before the tokens of the step before it are known, since features learn these on the device.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from splitserve.kernels.reference import sampling as reference
from splitserve.kernels.sampling import Sample, SamplingBatch, ScoreTokens
from splitserve.models.sampling.feature import Draw, Feature, LogitKernels, Rows, to_device
from splitserve.models.sampling.logprobs import RawDraws
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import SAMPLING_FEATURES, wanted_features
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan, draws_of

_REFERENCE = LogitKernels()
TokensBefore = Callable[[], Mapping[int, int]]
"""Returns the tokens that the step before drew, by chunk, once that step is over."""


def _no_step_before() -> Mapping[int, int]:
    return {}


@dataclass(frozen=True, slots=True)
class _States:
    """The states of one sequence's features."""

    slot: int
    params: SamplingParams
    num_prompt_tokens: int
    names: tuple[str, ...]  # of its features, in the order in which they apply
    noting: tuple[Feature, ...]  # those of them that need the token before a draw on the host


class Sampler:
    """Draws tokens on one device, and keeps the states of sampling features between the draws.

    Call :meth:`prepare` for each plan in the order of the steps, then :meth:`draw` unless no chunk draws.
    """

    def __init__(
        self,
        sample: Sample,
        vocab_size: int,
        device: torch.device,
        model_dir: Path | None = None,
        *,
        is_lead: bool = True,
        logit_kernels: LogitKernels = _REFERENCE,
        score_tokens: ScoreTokens = reference.score_tokens,
    ) -> None:
        """``model_dir``: the checkpoint's, for features that need its files. ``is_lead``: this rank's log-probabilities
        count."""
        self._sample = sample
        self._logit_kernels = logit_kernels
        self._score_tokens = score_tokens
        self._vocab_size = vocab_size
        self._device = device
        self._model_dir = model_dir
        self._is_lead = is_lead
        self.raw: RawDraws | None = None  # of the last draw; None if it wanted no log-probabilities
        self.errors: dict[int, str] = {}  # of the last draw, by row: why the request can't draw a token
        self._features: dict[str, Feature] = {}  # those that any request wanted so far, in no order
        self._states: dict[int, _States] = {}  # by their ids
        self._to_note: list[tuple[_States, int]] = []  # with the chunk of the last step that draws the token before
        self._free_slots: list[int] = []  # a heap of slots below len(_states) + len(_free_slots)

    @property
    def num_states(self) -> int:
        """Sequences whose features have states here."""
        return len(self._states)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Trigger the compilation of the kernels that features alone call."""
        logits = torch.zeros((1, self._vocab_size), device=self._device)
        rows = torch.zeros(1, dtype=torch.int64, device=self._device)
        bits = torch.zeros((1, -(-self._vocab_size // 32)), dtype=torch.int32, device=self._device)
        self._logit_kernels.mask_logits(logits, rows, bits)
        occurrences = torch.zeros((1, self._vocab_size), dtype=torch.int32, device=self._device)
        self._logit_kernels.penalise_logits(logits, rows, rows, occurrences, torch.ones((1, 3), device=self._device))

    def prepare(self, plan: StepPlan) -> None:
        """Give up states that no step uses any more, and make those that begin."""
        self._to_note = []
        for state_id in plan.released:
            self._release(state_id)
        for chunk in plan.chunks:
            if chunk.sample is not None and chunk.sample.features is not None:
                self._prepare(chunk.sample.features, chunk)
            for other in chunk.others:
                if other.features is not None:
                    self._prepare(other.features, chunk)

    def _prepare(self, use: FeatureUse, chunk: ScheduledChunk) -> None:
        """Make the states that begin, or carry present ones on with the token before the draw, if that is known."""
        if use.start is not None:
            self._release(use.state_id)
            self._states[use.state_id] = self._begin(use.start)
            return
        states = self._states[use.state_id]
        if chunk.previous_chunk is None:
            _note(states, chunk.token_ids[-1])
        elif states.noting:
            self._to_note.append((states, chunk.previous_chunk))

    def draw(
        self, logits: Tensor, chunks: Sequence[ScheduledChunk], tokens_before: TokensBefore = _no_step_before
    ) -> Tensor:
        """Return the tokens of the step's draws (:func:`draws_of`) -> int64 [N]; -1 for a row that isn't finite.

        ``logits`` [R, vocab], which may be changed, are the raw ones of the chunks that draw; with draws of other
        choices they are repeated. ``tokens_before`` is called only if a feature needs on the host a token that a step
        in flight draws; of a draw that failed there, any token will do, since its sequence ends.
        """
        if self._to_note:
            tokens = tokens_before()
            for states, chunk in self._to_note:
                _note(states, tokens.get(chunk, 0))
        specs = [chunk.sample for chunk in chunks if chunk.sample is not None]
        if any(chunk.others for chunk in chunks):
            draws = draws_of(chunks)
            row_of_chunk = {index: row for row, (index, _) in enumerate(draws[: len(specs)])}
            logits = logits[to_device(torch.tensor([row_of_chunk[index] for index, _ in draws]), logits.device)]
            specs = [spec for _, spec in draws]
        wanted = self._rows(specs)
        changes = bool(wanted) and logits.dtype == torch.float32  # otherwise features change a copy
        self.raw = RawDraws.of(logits, specs, self._score_tokens, changes=changes) if self._is_lead else None
        if wanted:
            logits = logits.float()
            for name, rows in wanted.items():
                self._features[name].apply(logits, rows)
        self.errors = {row: error for rows in wanted.values() for row, error in rows.errors.items()}
        drawn = self._sample(logits, sampling_batch(specs))
        for name, rows in wanted.items():
            self._features[name].advance(rows, drawn)
        return drawn

    # ---- states ----

    def _begin(self, start: FeatureStart) -> _States:
        slot = self._free_slots[0] if self._free_slots else len(self._states)
        names = wanted_features(start.params)
        for name in names:
            self._feature(name).begin(slot, start)
        if self._free_slots:
            heapq.heappop(self._free_slots)
        noting = tuple(self._features[name] for name in names if SAMPLING_FEATURES[name].needs_last_token)
        return _States(slot, start.params, len(start.prompt_ids), names, noting)

    def _feature(self, name: str) -> Feature:
        """Return a feature by name, made when a request first wants it."""
        feature = self._features.get(name)
        if feature is None:
            declared = SAMPLING_FEATURES[name]
            module = import_module(f"splitserve.models.sampling.features.{declared.module}")
            feature = getattr(module, declared.class_name)(self._vocab_size, self._device)
            assert isinstance(feature, Feature), f"{declared.class_name} isn't a Feature"
            feature.open(self._model_dir, self._logit_kernels)
            self._features[name] = feature
        return feature

    def _release(self, state_id: int) -> None:
        """Forget states; no effect if they were never made, as after a step that failed."""
        states = self._states.pop(state_id, None)
        if states is not None:
            heapq.heappush(self._free_slots, states.slot)
            for name in states.names:
                self._features[name].end(states.slot)

    # ---- the draws of a step ----

    def _rows(self, specs: Sequence[SampleSpec]) -> dict[str, Rows]:
        """Return the draws of each feature that any of them wants, in the order in which features apply."""
        draws: dict[str, list[Draw]] = {}
        for row, spec in enumerate(specs):
            if spec.features is not None:
                states = self._states[spec.features.state_id]
                draw = Draw(row, states.slot, states.params, states.num_prompt_tokens, spec.position)
                for name in states.names:
                    draws.setdefault(name, []).append(draw)
        return {name: Rows(draws[name], self._device) for name in SAMPLING_FEATURES if name in draws}


def _note(states: _States, token_id: int) -> None:
    for feature in states.noting:
        feature.note_token(states.slot, token_id)


def sampling_batch(specs: Sequence[SampleSpec]) -> SamplingBatch:
    """Return the sampling parameters of the rows to draw."""
    return SamplingBatch(
        temperatures=[spec.temperature for spec in specs],
        top_ks=[spec.top_k for spec in specs],
        top_ps=[spec.top_p for spec in specs],
        seeds=[spec.seed for spec in specs],
        choices=[spec.choice for spec in specs],
        positions=[spec.position for spec in specs],
    )
