"""``min_p``: tokens that are much less probable than the most probable one are not drawn (Nguyen et al., 2024)."""

import math

import torch
from torch import Tensor

from splitserve.models.sampling.feature import BANNED, Draw, Feature, Rows


class MinP(Feature):
    """Keeps the tokens whose probability is at least ``min_p`` of the largest, after temperature."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        chosen = logits[rows.rows]
        floor = chosen.amax(dim=-1, keepdim=True) + rows.column(_log_share)
        logits[rows.rows] = torch.where(chosen < floor, chosen.clamp(max=BANNED), chosen)


def _log_share(draw: Draw) -> float:
    """Return the most that a kept logit may lie below the largest, negated."""
    return math.log(draw.params.min_p) * draw.params.temperature
