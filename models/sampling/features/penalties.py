"""Penalties for tokens that occurred: repetition (prompt and output), presence and frequency (output only).

Only the logits of tokens that occurred are touched. A slot keeps their ids, repeats included, and how often each token
of the vocabulary is in the output. A repeated id computes and writes the same value once more.
"""

import torch
from torch import Tensor

from splitserve.models.sampling.feature import Feature, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.step import FeatureStart


class Penalties(Feature):
    """``repetition_penalty`` as in Keskar et al. (2019), then ``presence_penalty`` and ``frequency_penalty`` as in
    OpenAI's API."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._counts = SlotTable(vocab_size, torch.int32, device)  # of each token in the output
        self._seen = SlotTable(0, torch.int32, device)  # ids of tokens to penalise
        self._lengths: dict[int, int] = {}  # by slot: how many of them there are

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        output = torch.tensor(list(start.output_ids), dtype=torch.int64)
        prompt = start.prompt_ids if start.params.repetition_penalty != 1.0 else ()
        seen = torch.tensor([*dict.fromkeys(prompt), *start.output_ids], dtype=torch.int32)
        self._counts.reserve(slot + 1)
        self._seen.reserve(slot + 1, len(seen) + 1)
        self._lengths[slot] = len(seen)
        self._seen.row(slot)[: len(seen)] = to_device(seen, self.device)
        counts = self._counts.row(slot).zero_()
        ones = torch.ones(len(output), dtype=torch.int32, device=self.device)
        counts.index_add_(0, to_device(output, self.device), ones)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        kept = [draw for draw in rows.draws if self._lengths[draw.slot]]
        if not kept:
            return
        rows = rows if len(kept) == len(rows.draws) else Rows(kept, self.device)
        ids = self._seen_ids(rows)  # [n, L]
        counts = self._counts.values[rows.slots[:, None], ids]
        chosen = logits[rows.rows[:, None], ids]
        repetition = rows.column(lambda draw: draw.params.repetition_penalty)
        chosen = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
        chosen -= rows.column(lambda draw: draw.params.frequency_penalty) * counts
        chosen -= rows.column(lambda draw: draw.params.presence_penalty) * (counts > 0)
        logits[rows.rows[:, None], ids] = chosen

    def _seen_ids(self, rows: Rows) -> Tensor:
        """Return the ids to penalise -> int64 [n, L]; shorter rows repeat their last one."""
        lengths = [self._lengths[draw.slot] for draw in rows.draws]
        last = to_device(torch.tensor(lengths), self.device)[:, None] - 1
        columns = torch.arange(max(lengths), device=self.device)[None, :].minimum(last)
        return self._seen.values[rows.slots[:, None], columns].long()

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        slots = [draw.slot for draw in rows.draws]
        ends = [self._lengths[slot] for slot in slots]
        self._seen.reserve(0, max(ends) + 1)
        self._seen.values[rows.slots, to_device(torch.tensor(ends), self.device)] = drawn.int()
        self._counts.values[rows.slots, drawn] += 1
        for slot in slots:
            self._lengths[slot] += 1

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._lengths[slot]

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        length = self._lengths[slot]
        return self._seen.row(slot)[:length].tolist(), self._counts.row(slot).tolist()
