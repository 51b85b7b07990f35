"""Fit of a step-time model to a worker's own steps, while it serves. Pure: times come in as arguments."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs
from splitserve.protocol.step import StepPlan

MIN_FITTED_STEPS = 30
"""Number of steps below which an estimate is better than a fit. A prefill worker has few: one for each prompt."""
MEMORY_STEPS = 500
"""Steps of a kind after which a step's weight has fallen to 1/e. Kinds are forgotten apart: an hour of decoding does
not erase what is known of prompts, nor does a minute of one sequence erase what is known of fifty."""
KIND_WEIGHT = 0.1
"""Weight of steps with four times as many sequences as the last one that decoded, or a quarter. Steps take longer the
more sequences they have, but less and less so: a line through all of them is wrong where the load is. Steps of prompts
alone count in full: only they tell what a prompt token costs there."""
REFIT_STEPS = 50
EARLY_REFIT_STEPS = 10
"""Steps between fits among a worker's first ``4 * REFIT_STEPS`` steps."""
MAX_SURPRISE = 4.0
"""A step beyond this multiple of its prediction counts as one of this multiple: a stall says nothing about the work.
For steps before the first fit, the prediction is the estimate's, times the median ratio of these steps to that."""
MINUTE_SECONDS = 60.0
_ERROR_STEPS = 300
_ESTIMATE_WEIGHT = 0.5  # of the estimate, in steps: it decides what the steps say little about

_Floats = npt.NDArray[np.float64]


class _Kind(NamedTuple):
    """Steps that are forgotten together: with prompts or without, of like numbers of sequences that decode."""

    has_prompts: bool
    size: int  # 0: none decodes, 1: up to 3 do, 2: up to 15, 3: up to 63, and so on

    @classmethod
    def of(cls, work: StepWork) -> "_Kind":
        return cls(work.prefill_tokens > 0, (int(work.num_decodes).bit_length() + 1) // 2)


class _Moments:
    """Weighted sums over steps of one kind: of products of the work, and of the work with the seconds."""

    def __init__(self, size: int) -> None:
        self.products: _Floats = np.zeros((size, size))
        self.targets: _Floats = np.zeros(size)
        self.num_steps = 0.0  # by their weights

    def add(self, row: _Floats, target: float) -> None:
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self.products = keep * self.products + np.outer(row, row)
        self.targets = keep * self.targets + target * row
        self.num_steps = keep * self.num_steps + 1.0


class _Minutes:
    """Error of the time that a minute's steps took in all, as the model of the minute's begin predicts it."""

    def __init__(self, model: StepModel) -> None:
        self.error = 0.0  # of the last whole minute, relative to the time that its steps took
        self._model = model
        self._ends_at = 0.0  # of the present minute
        self._predicted = self._taken = 0.0

    def note(self, work: StepWork, seconds: float, model: StepModel, now: float) -> None:
        """Take a step into account that ended ``now``; ``model`` is the present one."""
        if now >= self._ends_at:
            if self._taken and self._model.num_steps and now < self._ends_at + MINUTE_SECONDS:
                self.error = abs(self._predicted / self._taken - 1.0)
            self._model, self._ends_at = model, now + MINUTE_SECONDS
            self._predicted = self._taken = 0.0
        self._predicted += self._model.seconds(work)
        self._taken += seconds


class StepFit:
    """Least squares with non-negative coefficients, of errors relative to the predicted times.

    Errors relative to the steps' own times would weigh quick steps more than slow ones, and so predict less than the
    mean: 8% less where times scatter by 20%.

    ``estimate``: the model until :data:`MIN_FITTED_STEPS` steps were seen; later it decides what no step has shown.
    ``relative_error``: mean error of the predictions of the last few hundred steps, relative to their true times.
    """

    def __init__(self, estimate: StepModel) -> None:
        self.model = estimate
        self._estimate = estimate
        self._num_steps = 0
        self.relative_error = 0.0
        self._early: list[tuple[StepWork, float]] = []  # steps before the first fit
        self._moments: dict[_Kind, _Moments] = {}
        self._present = 0  # size of the last step that decoded
        self._minutes = _Minutes(estimate)

    @property
    def minute_error(self) -> float:
        """Error of the last minute's step time in all, as the model before that minute predicts it; 0: not known."""
        return self._minutes.error

    def note(self, plan: StepPlan, seconds: float, now: float) -> None:
        """Take the time of a step that ended ``now`` into account."""
        self.note_work(work_of(plan), seconds, now)

    def note_work(self, work: StepWork, seconds: float, now: float) -> None:
        """Take the time of a step with this work into account."""
        if seconds <= 0.0:
            return
        self._minutes.note(work, seconds, self.model, now)
        self._num_steps += 1
        predicted = self.model.seconds(work)
        self._note_error(predicted, seconds)
        if self.model.num_steps:
            self._add(work, seconds, predicted)
        else:
            self._early.append((work, seconds))
        between = EARLY_REFIT_STEPS if self._num_steps < 4 * REFIT_STEPS else REFIT_STEPS
        if self._num_steps >= MIN_FITTED_STEPS and self._num_steps % between == 0:
            self._add_early()
            self.model = self._fitted()

    def _note_error(self, predicted: float, seconds: float) -> None:
        error = min(abs(predicted - seconds) / seconds, MAX_SURPRISE)
        self.relative_error += (error - self.relative_error) / min(self._num_steps, _ERROR_STEPS)

    def _add_early(self) -> None:
        """Add the steps before the first fit. Some may have compiled kernels, and the estimate may be far off."""
        if not self._early:
            return
        predictions = [self.model.seconds(work) for work, _ in self._early]
        ratios = [own / each for (_, own), each in zip(self._early, predictions, strict=True) if each > 0.0]
        ratio = statistics.median(ratios) if ratios else 0.0
        for (work, seconds), predicted in zip(self._early, predictions, strict=True):
            self._add(work, seconds, ratio * predicted)
        self._early.clear()

    def _add(self, work: StepWork, seconds: float, predicted: float) -> None:
        """Add a step to the moments, with its error relative to the predicted seconds, if there are any."""
        scale = seconds
        if predicted > 0.0:
            scale, seconds = predicted, min(seconds, MAX_SURPRISE * predicted)
        alone = 0.0 if work.num_decodes else work.prefill_tokens
        # Relative to the scale, so that short steps count as much as long ones
        row = np.array([1.0, *work, alone]) / scale
        kind = _Kind.of(work)
        self._present = kind.size or self._present
        if kind not in self._moments:
            self._moments[kind] = _Moments(len(row))
        self._moments[kind].add(row, seconds / scale)

    def _fitted(self) -> StepModel:
        """Return the model for steps with about as many sequences as the present ones, once some of them were seen."""
        seen = sum(moments.num_steps for kind, moments in self._moments.items() if kind.size == self._present)
        weight_of_kind = KIND_WEIGHT if seen >= REFIT_STEPS else 1.0
        estimate = np.array(_by_kind(self._estimate.coefficients))
        scale = np.where(estimate > 0.0, estimate, 1e-9)  # coefficients differ by many orders of magnitude
        size = len(scale)
        products, targets, num_steps = np.zeros((size, size)), np.zeros(size), 0.0
        for kind, moments in self._moments.items():
            near = weight_of_kind ** abs(kind.size - self._present) if kind.size else 1.0
            products += near * moments.products
            targets += near * moments.targets
            num_steps += near * moments.num_steps
        products, targets = products * np.outer(scale, scale), targets * scale
        weight = _ESTIMATE_WEIGHT * np.trace(products) / size / num_steps
        solution = non_negative(products + weight * np.eye(size), targets + weight * (estimate / scale))
        *others, beside, per_pair, saved = (solution * scale).tolist()
        return StepModel.of((*others, beside + saved, per_pair, saved), self._num_steps)


def _by_kind(coefficients: Sequence[float]) -> list[float]:
    """Return a model's coefficients with the seconds per prompt token in any step, and those on top in one that doesn't
    decode: neither is negative."""
    *others, per_token, per_pair, saved = coefficients
    return [*others, max(0.0, per_token - saved), per_pair, min(saved, per_token)]


def non_negative(products: _Floats, targets: _Floats) -> _Floats:
    """Return the ``x >= 0`` that minimises ``x @ products @ x / 2 - targets @ x``; ``products`` is positive definite.

    By active sets (Lawson and Hanson, 1974), so in a few solutions of small systems however alike the unknowns are:
    the worker's next step waits for it.
    """
    solution = np.asarray(np.linalg.solve(products, targets), dtype=np.float64)
    if solution.min() >= 0.0:
        return solution
    size = len(targets)
    least_gain = 1e-10 * float(np.abs(targets).max())
    free, solution = np.zeros(size, dtype=bool), np.zeros(size)
    for _ in range(3 * size):
        gains = np.where(free, 0.0, targets - products @ solution)
        best = int(gains.argmax())
        if gains[best] <= least_gain:
            break
        free[best] = True
        solution = _with_free(products, targets, solution, free)
    return solution


def _with_free(products: _Floats, targets: _Floats, solution: _Floats, free: npt.NDArray[np.bool_]) -> _Floats:
    """Return the minimum from ``solution`` on, in the ``free`` unknowns: those that would be negative are no longer."""
    while True:
        wanted = np.zeros(len(targets))
        wanted[free] = np.linalg.solve(products[np.ix_(free, free)], targets[free])
        below = free & (wanted < 0.0)
        if not below.any():
            return wanted
        shares = solution[below] / (solution[below] - wanted[below])
        solution = solution + shares.min() * (wanted - solution)
        free[np.flatnonzero(below)[shares == shares.min()]] = False
        solution = np.where(free, solution, 0.0)


def work_of(plan: StepPlan) -> StepWork:
    """Return the work of a plan."""
    num_decodes = decode_context = prefill_tokens = 0
    prefill_pairs = 0.0
    for chunk, is_decode in zip(plan.chunks, plan.are_decodes, strict=True):
        if is_decode:
            num_decodes += 1
            decode_context += chunk.start + 1
        else:
            count = len(chunk.token_ids)
            prefill_tokens += count
            prefill_pairs += pairs(chunk.start, count)
    return StepWork(num_decodes, decode_context, prefill_tokens, prefill_pairs)
