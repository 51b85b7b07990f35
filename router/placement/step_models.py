"""Step-time models as the router trusts them: a worker's fit within bounds of its pool's, or the pool's own. Pure."""

import itertools
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from splitserve.protocol.placement.step_model import StepModel

TRUSTED_STEPS = 30
"""Steps below which a worker's fit says less than its pool's."""
NO_MODEL = StepModel()
MAX_REFERENCES = 32
"""Models of other workers that the reference is made of: enough, and a large pool costs no more than a small one."""
MAX_FACTOR = 4.0
"""Largest factor between a worker's coefficients and its reference's: a wilder fit is held there."""


class Known(NamedTuple):
    """A worker's model, and its estimate from its device's rates, which it sent before it had run enough steps."""

    model: StepModel
    estimate: StepModel = NO_MODEL


def trusted_model(own: Known, others: Iterable[Known], alike: Iterable[Known] = ()) -> StepModel:
    """Return the model to predict a worker's steps with. ``others``: the other workers of its role; ``alike``: workers
    of other roles with the same model and device.

    The reference is the median of at most :data:`MAX_REFERENCES` others that were fitted; a single one counts as it is
    trusted for its own worker, held near its estimate: else the two would differ though one fit is all that is known.
    Without others it is the worker's estimate, if that is known, in the ratio of fits to estimates of workers alike.
    """
    is_fitted = own.model.num_steps >= TRUSTED_STEPS
    fitted = list(itertools.islice((each for each in others if each.model.num_steps >= TRUSTED_STEPS), MAX_REFERENCES))
    if len(fitted) == 1:
        reference = _held(fitted[0])
    elif fitted:
        columns = zip(*(each.model.coefficients for each in fitted), strict=True)
        reference = StepModel.of([median(column) for column in columns], 0)
    elif own.estimate == NO_MODEL:
        return own.model
    else:
        reference = own.estimate if is_fitted else _corrected(own.estimate, alike)
    return own.model.clamped(reference, MAX_FACTOR) if is_fitted else reference


def _held(known: Known) -> StepModel:
    """Return a fit near its estimate, if that is known."""
    model, estimate = known
    return model if estimate == NO_MODEL else model.clamped(estimate, MAX_FACTOR)


def _corrected(estimate: StepModel, alike: Iterable[Known]) -> StepModel:
    """Return an estimate in the median ratio of fits to estimates of workers alike. What no step of theirs has shown
    stays: their fits have it from their estimates."""
    known = (each for each in alike if each.model.num_steps >= TRUSTED_STEPS and each.estimate != NO_MODEL)
    ratios = [_ratios(each) for each in itertools.islice(known, MAX_REFERENCES)]
    if not ratios:
        return estimate
    factors = [median(column) for column in zip(*ratios, strict=True)]
    return StepModel.of([c * f for c, f in zip(estimate.coefficients, factors, strict=True)], estimate.num_steps)


def _ratios(known: Known) -> list[float]:
    pairs = zip(_held(known).coefficients, known.estimate.coefficients, strict=True)
    return [one / other if other else 1.0 for one, other in pairs]
