"""Step-time models as the router trusts them: a worker's fit within bounds of its pool's, or the pool's own. Pure."""

import itertools
from collections.abc import Iterable
from statistics import median

from splitserve.protocol.placement.step_model import StepModel

TRUSTED_STEPS = 200
"""Steps below which a worker's fit says less than its pool's."""
NO_MODEL = StepModel()
MAX_REFERENCES = 32
"""Models of other workers that the reference is made of: enough, and a large pool costs no more than a small one."""
MAX_FACTOR = 4.0
"""Largest factor between a worker's coefficients and its reference's: a wilder fit is held there."""


def trusted_model(own: StepModel, others: Iterable[StepModel], estimate: StepModel = NO_MODEL) -> StepModel:
    """Return the model to predict a worker's steps with. ``others``: the models of the other workers of its role;
    ``estimate``: the worker's own from its device's rates, before it had run enough steps.

    The reference is the median of at most :data:`MAX_REFERENCES` others that were fitted; without them it is the
    estimate, if that is known.
    """
    trusted = (model for model in others if model.num_steps >= TRUSTED_STEPS)
    fitted = list(itertools.islice(trusted, MAX_REFERENCES))
    if fitted:
        columns = zip(*(model.coefficients for model in fitted), strict=True)
        reference = StepModel.of([median(column) for column in columns], 0)
        return own.clamped(reference, MAX_FACTOR) if own.num_steps >= TRUSTED_STEPS else reference
    is_wild = own.num_steps >= TRUSTED_STEPS and estimate != NO_MODEL
    return own.clamped(estimate, MAX_FACTOR) if is_wild else own
