"""``min_p``: tokens that are much less probable than the most probable one are not drawn (Nguyen et al., 2024)."""

import math

import torch
from torch import Tensor

from splitserve.kernels.sampling import FORBIDDEN
from splitserve.models.sampling.feature import Draw, Feature, Rows


class MinP(Feature):
    """Keeps the tokens whose probability is at least ``min_p`` of the largest, after temperature."""

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        if self.device.type == "cpu":
            for draw in rows.draws:
                _cut(logits[draw.row], _log_share(draw))
        else:
            chosen = logits[rows.rows]
            floor = chosen.amax(dim=-1, keepdim=True) + rows.column(_log_share)
            logits[rows.rows] = torch.where(chosen < floor, FORBIDDEN, chosen)


def _cut(row: Tensor, log_share: float) -> None:
    """Forbid the tokens of one row [vocab] on a CPU whose logit is below the largest plus ``log_share``."""
    floor = row.amax() + log_share
    below = torch.nextafter(floor, floor.new_full((), -math.inf))
    torch.threshold_(row, float(below), FORBIDDEN)


def _log_share(draw: Draw) -> float:
    """Return the most that a kept logit may lie below the largest, negated."""
    return math.log(draw.params.min_p) * draw.params.temperature
