"""``bad_words``: sequences of tokens that the output doesn't complete. Their beginnings may be drawn.

A slot keeps the last tokens of its sequence on the device, prompt included: a step may be launched before they are
known here. Shorter words, and sequences, are filled up on the left.
"""

import numpy as np
import torch
from torch import Tensor

from splitserve.models.sampling.feature import BAN, Feature, Int64Array, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.sampling_features import MAX_BAD_WORD_TOKENS
from splitserve.protocol.step import FeatureStart

_ANY = -1
_NONE = -2
_NUM_RECENT = MAX_BAD_WORD_TOKENS - 1


class BadWords(Feature):
    """Bans the last token of each word whose other tokens stand at the sequence's end."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._recent = SlotTable(_NUM_RECENT, torch.int64, device)
        self._words: dict[int, Int64Array] = {}  # by slot: [num_words, MAX_BAD_WORD_TOKENS]

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        words = start.params.bad_words
        self._words[slot] = np.full((len(words), MAX_BAD_WORD_TOKENS), _ANY, dtype=np.int64)
        for row, word in zip(self._words[slot], words, strict=True):
            row[-len(word) :] = word
        last = [*start.prompt_ids[-_NUM_RECENT:], *start.output_ids][-_NUM_RECENT:]
        recent = torch.tensor([_NONE] * (_NUM_RECENT - len(last)) + last)
        self._recent.reserve(slot + 1)
        self._recent.row(slot).copy_(to_device(recent, self.device))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        words = [self._words[draw.slot] for draw in rows.draws]
        indices = np.repeat([(draw.row, draw.slot) for draw in rows.draws], [len(each) for each in words], axis=0)
        packed = to_device(torch.from_numpy(np.hstack((indices, np.concatenate(words)))), self.device)
        begins, recent = packed[:, 2:-1], self._recent.values[packed[:, 1]]  # [N, MAX_BAD_WORD_TOKENS - 1]
        is_complete = ((begins == _ANY) | (begins == recent)).all(dim=1)
        # Two words may end with the same token: their bans add up.
        logits.index_put_((packed[:, 0], packed[:, -1]), is_complete * BAN, accumulate=True)

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        recent = self._recent.values[rows.slots]
        self._recent.values[rows.slots] = torch.cat((recent[:, 1:], rows.tokens(drawn)[:, None]), dim=1)

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._words[slot]

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        return self._words[slot].tolist(), self._recent.row(slot).tolist()
