"""The times of a twin worker's steps, and what the worker knows of them."""

from collections.abc import Iterable
from typing import Protocol

from splitserve.engine.steps.step_fit import StepFit
from splitserve.models.expert_reads import ExpertReads
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Role


class StepLaw(Protocol):
    """True step times of a twin's worker. A step model implements it."""

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        ...


class ExpertLaw:
    """Step times by a role's model, with the experts that a step's tokens hit in the place of the model's line."""

    def __init__(self, model: StepModel, reads: ExpertReads, role: Role) -> None:
        self._model = model
        self._reads = reads
        self._role = role

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return max(0.0, self._model.seconds(work) + self._reads.seconds_beyond(self._role, work))


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
