"""Fits on the totals that workers count over a load: step times, and the time of their loops between steps. Pure.

A worker fits its model to single steps of the kinds that it has. Totals of several loads tell whether the sum of its
predictions is the time that its steps took, and how much of that comes with each step, how much with its work.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splitserve.benchmarks.twin.cases import Measured
from splitserve.benchmarks.twin.residuals import StepTotals
from splitserve.engine.steps.step_fit import non_negative
from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs
from splitserve.protocol.request import Role
from splitserve.workloads.named import parse_workload

FACTOR_DEVIATION = 0.2
"""Standard deviation by which the factors of steps and of their work are assumed to differ: it decides where the totals
scatter too much, or are too much alike, to tell the two apart."""
_ROUNDS = 5
MIN_SEQUENCES = 4.0
"""Mean sequences of a step from which a worker counts as hardly ever idle: so many at random are none for 2% of the
time, which is left out."""


@dataclass(frozen=True, slots=True)
class RoleTotals:
    """Steps of all workers with a role over one load: their sums, and the work in them."""

    steps: StepTotals
    work: StepWork
    num_workers: int
    max_num_seqs: int
    duration_seconds: float  # of the load

    @property
    def mean_work(self) -> StepWork:
        """Return the work of the mean step."""
        return StepWork(*(each / self.steps.num_steps for each in self.work))

    @property
    def loop_seconds(self) -> float | None:
        """Return the mean time between two steps; None if the workers may have been idle in it."""
        batch = self.mean_work.num_decodes
        is_full = batch >= self.max_num_seqs / 2
        if not is_full and batch < MIN_SEQUENCES:
            return None
        seconds = self.num_workers * self.duration_seconds * (1.0 if is_full else 1.0 - math.exp(-batch))
        return max(0.0, seconds - self.steps.seconds) / self.steps.num_steps


@dataclass(frozen=True, slots=True)
class LoopFit:
    """Seconds of a worker's loop between two steps."""

    step_seconds: float = 0.0
    sequence_seconds: float = 0.0  # per sequence that decodes
    token_seconds: float = 0.0  # per prompt token


def totals_of(run: Measured) -> dict[Role, RoleTotals]:
    """Return the totals of each role; none of an arrangement whose decode work two roles share.

    The work follows from the requests and from the tokens that the workers counted: those that no decode step computed
    are of prompts, as far from their prompts' begin as all are.
    """
    if not run.step_totals or {Role.DECODE, Role.MIXED} <= run.step_totals.keys():
        return {}
    decodes, context, pairs_per_token = _request_work(run)
    found = {}
    for role, steps in run.step_totals.items():
        if not steps.num_steps:
            continue
        workers = [worker for worker in run.workers if worker.role is role]
        num_decodes = 0 if role is Role.PREFILL else min(decodes, steps.num_tokens)
        tokens = steps.num_tokens - num_decodes
        work = StepWork(num_decodes, context * num_decodes, tokens, tokens * pairs_per_token)
        max_num_seqs = workers[0].engine.max_num_seqs
        found[role] = RoleTotals(steps, work, len(workers), max_num_seqs, run.figures["duration_seconds"])
    return found


def _request_work(run: Measured) -> tuple[int, float, float]:
    """Return the tokens that decode steps computed, the mean context of one, the mean pairs of a prompt token."""
    num_decodes = context = num_tokens = 0
    num_pairs = 0.0
    for conversation in parse_workload(run.case.workload).at(run.rate, run.num_requests, run.seed).conversations:
        length = 0
        for turn in conversation.turns:
            num_pairs += pairs(length, turn.num_new_tokens)
            num_tokens += turn.num_new_tokens
            length += turn.num_new_tokens
            more = turn.num_output_tokens - 1  # a prompt's last step draws the first token
            num_decodes += more
            context += more * length + more * (more + 1) // 2
            length += turn.num_output_tokens
    return num_decodes, context / max(1, num_decodes), num_pairs / max(1, num_tokens)


def fit_steps(models: Sequence[StepModel], totals: Sequence[RoleTotals]) -> tuple[StepModel, float]:
    """Return the mean of the workers' ``models``, in which the seconds per step and those of the work are scaled until
    the totals are right; and the standard deviation of the totals about it, relative to them."""
    weights = [model.num_steps for model in models]
    coefficients = np.average([model.coefficients for model in models], axis=0, weights=weights)
    mean = StepModel.of(coefficients.tolist(), max(weights))
    if not totals:
        return mean, 0.0
    predicted = np.array([mean.seconds(each.work) + mean.base * (each.steps.num_steps - 1) for each in totals])
    of_steps = np.array([mean.base * each.steps.num_steps for each in totals]) / predicted
    rows = np.column_stack([of_steps, 1.0 - of_steps])
    ratios = np.array([each.steps.seconds for each in totals]) / predicted
    deviation = FACTOR_DEVIATION
    for _ in range(_ROUNDS):
        same = (deviation / FACTOR_DEVIATION) ** 2 * np.array([[1.0, -1.0], [-1.0, 1.0]])
        base, work = non_negative(rows.T @ rows + same + 1e-9 * np.eye(2), rows.T @ ratios)
        deviation = statistics.pstdev((ratios / (rows @ [base, work])).tolist())
    factors = np.array([base, *[work] * (len(coefficients) - 1)])
    return StepModel.of((coefficients * factors).tolist(), mean.num_steps), deviation


def fit_loop(totals: Sequence[Mapping[Role, RoleTotals]]) -> LoopFit:
    """Return the loop's time between steps, from the workers that decoded and were hardly ever idle."""
    rows, targets = [], []
    for each in totals:
        for found in each.values():
            if (seconds := found.loop_seconds) is not None:
                work = found.mean_work
                rows.append([1.0, work.num_decodes, work.prefill_tokens])
                targets.append(seconds)
    if not rows:
        return LoopFit()
    scale = np.array([1.0, 0.1, 1e-3])  # near the ratios of the three
    scaled = np.array(rows) * scale
    solution = non_negative(scaled.T @ scaled + 1e-6 * np.eye(3), scaled.T @ np.array(targets))
    return LoopFit(*(solution * scale).tolist())
