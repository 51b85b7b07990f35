"""Step-time models as the router trusts them: a worker's fit within bounds of its pool's, or the pool's own. Pure."""

from collections.abc import Iterable
from statistics import median

from splitserve.protocol.placement.step_model import StepModel

TRUSTED_STEPS = 200
"""Steps below which a worker's fit says less than its pool's."""
MAX_FACTOR = 4.0
"""Largest factor between a worker's coefficients and its reference's: a wilder fit is held there."""


def trusted_model(own: StepModel, others: Iterable[StepModel]) -> StepModel:
    """Return the model to predict a worker's steps with. ``others``: the models of the other workers of its role.

    The reference is the median of the others that were fitted. Without them it is the worker's estimate of itself.
    """
    fitted = [model for model in others if model.num_steps >= TRUSTED_STEPS]
    if fitted:
        columns = zip(*(model.coefficients for model in fitted), strict=True)
        reference = StepModel.of([median(column) for column in columns], 0)
        return own.clamped(reference, MAX_FACTOR) if own.num_steps >= TRUSTED_STEPS else reference
    return own
