"""``logit_bias``: numbers that a request adds to the logits of some tokens."""

import numpy as np
import torch
from torch import Tensor

from splitserve.models.sampling.feature import Feature, Int64Array, Rows, entries, to_device
from splitserve.protocol.step import FeatureStart


class LogitBias(Feature):
    """Keeps a request's biases as arrays, so that a step only joins them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._biases: dict[int, tuple[Int64Array, Tensor]] = {}  # by slot: token ids, float32 of the same length

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        biases = start.params.logit_bias
        self._biases[slot] = np.fromiter(biases, np.int64, len(biases)), torch.tensor(list(biases.values()))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        biases = [self._biases[draw.slot] for draw in rows.draws]
        indices = entries(rows, [ids for ids, _ in biases])
        logits[indices] += to_device(torch.cat([values for _, values in biases]), self.device)

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._biases[slot]
