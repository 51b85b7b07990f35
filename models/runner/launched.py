"""Steps that a CUDA device runs: the part that waits for them, and the events for which they wait."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitserve.models.runner.runner import output_of_step
from splitserve.models.sampling.logprobs import PromptRows, StepScores
from splitserve.protocol.step import StepOutput, StepPlan


class Gates(Protocol):
    """The part of :class:`splitserve.kvconnector.tiers.load_gates.LoadGates` that the runner uses."""

    @property
    def first_layers(self) -> Sequence[int]:
        """The first layer of each group of layers. The groups are copied one after the other."""

    def event(self, copy_id: int, first_layer: int) -> torch.cuda.Event | None:
        """Return the event recorded after the copies of the group that begins at ``first_layer``; None if they are
        over. Blocks until they are queued."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step."""

    plan: StepPlan
    numbers: Tensor  # int64, pinned: a token for each draw, then the scores; valid once ``done`` has happened
    scores: StepScores | None
    done: torch.cuda.Event
    errors: Mapping[int, str]  # by row of the drawn tokens
    queued_at: float  # see :class:`splitserve.protocol.step.LaunchedStep`

    def wait(self) -> StepOutput:
        """Block until the step has completed. Raises :class:`NonFiniteLogitsError`, or the device's own error."""
        self.done.synchronize()
        return output_of_step(self.plan, self.numbers.numpy(), self.scores, self.errors)


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A step whose forward pass is queued, and whose draws aren't.
    Implements :class:`splitserve.protocol.step.LaunchedForward`."""

    draw: Callable[["LaunchedForward"], PendingStep]
    plan: StepPlan
    before: "StepBefore"
    prompts: PromptRows | None
    logits: Tensor | None  # [R, vocab]; None: no chunk draws
    queued_at: float

    def launch_draws(self) -> PendingStep:
        return self.draw(self)


@dataclass(frozen=True, slots=True)
class StepBefore:
    """The step launched before another one, whose draws may need its tokens on the host."""

    pending: PendingStep | None  # None: there was none, or its launch failed
    rows: Mapping[int, int]  # of the drawn tokens, by chunk

    def tokens(self) -> Mapping[int, int]:
        """Wait for the step, and return its tokens by chunk; 0 of a draw that failed. Raises the device's error."""
        if self.pending is None:
            return {}
        self.pending.done.synchronize()
        numbers = self.pending.numbers[: len(self.rows)].tolist()
        return {chunk: max(0, numbers[row]) for chunk, row in self.rows.items()}
