"""``allowed_token_ids``: the only tokens that may be drawn."""

import torch
from torch import Tensor

from splitserve.models.sampling.feature import BANNED, Feature, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.step import FeatureStart


class AllowedTokens(Feature):
    """Keeps a request's allowed tokens as a mask on the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._allowed = SlotTable(vocab_size, torch.bool, device)

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        self._allowed.reserve(slot + 1)
        allowed = to_device(torch.tensor(start.params.allowed_token_ids), self.device)
        self._allowed.row(slot).fill_(False)[allowed] = True

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        allowed = self._allowed.values[rows.slots]
        chosen = logits[rows.rows]
        logits[rows.rows] = torch.where(allowed, chosen, chosen.clamp(max=BANNED))
