"""The times of a twin worker's steps, and what the worker knows of them."""

import math
from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

from splitserve.engine.steps.step_fit import StepFit
from splitserve.protocol.placement.step_model import StepModel, StepWork


class StepLaw(Protocol):
    """True step times of a twin's worker. A step model implements it."""

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        ...


class ExpertReads(msgspec.Struct, frozen=True, kw_only=True):
    """Reads of a mixture's experts in a step. A step model has a straight line of them, far from steps of few sequences
    and of long prompts: ``counted`` experts of a layer in each step, ``counted_per_decode`` with each sequence.
    """

    num_experts: Annotated[int, msgspec.Meta(ge=1)]  # of a layer
    missed: Annotated[float, msgspec.Meta(ge=0, le=1)]  # probability that a token doesn't have a given expert
    expert_seconds: Annotated[float, msgspec.Meta(ge=0)]  # to read one expert of every layer
    counted: float
    counted_per_decode: float

    def seconds_beyond(self, work: StepWork) -> float:
        """Return the seconds by which the reads of a step differ from those that its model has; negative: are less."""
        hit = self.num_experts * (1 - math.pow(self.missed, work.num_decodes + work.prefill_tokens))
        return (hit - self.counted - self.counted_per_decode * work.num_decodes) * self.expert_seconds


class ExpertLaw:
    """Step times by a model, with the experts that a step's tokens hit in the place of the model's line."""

    def __init__(self, model: StepModel, reads: ExpertReads) -> None:
        self._model = model
        self._reads = reads

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return max(0.0, self._model.seconds(work) + self._reads.seconds_beyond(work))


class StepTimes:
    """Step times by a law, to which the worker fits its model, as real ones do: ``estimate`` is what it begins with.
    Without a law the estimate is true."""

    def __init__(self, estimate: StepModel, law: StepLaw | None) -> None:
        self._law = estimate if law is None else law
        self._fit = None if law is None else StepFit(estimate)
        self._estimate = estimate

    @property
    def model(self) -> StepModel:
        """The worker's own model."""
        return self._estimate if self._fit is None else self._fit.model

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return self._law.seconds(work)

    def note(self, works: Iterable[StepWork], now: float) -> None:
        """Let the worker learn from steps."""
        if self._fit is not None:
            for work in works:
                self._fit.note_work(work, self._law.seconds(work), now)
