"""Penalties for tokens that occurred: repetition (prompt and output), presence and frequency (output only).

Only the logits of tokens that occurred are touched. A slot keeps their ids, repeats included, and how often each token
of the vocabulary is in the output. A repeated id computes and writes the same value once more.
"""

import torch
from torch import Tensor

from splitserve.models.sampling.feature import Feature, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart


class Penalties(Feature):
    """``repetition_penalty`` as in Keskar et al. (2019), then ``presence_penalty`` and ``frequency_penalty`` as in
    OpenAI's API."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._counts = SlotTable(vocab_size, torch.int32, device)  # of each token in the output
        self._seen = SlotTable(0, torch.int64, device)  # ids of tokens to penalise
        self._lengths: dict[int, int] = {}  # by slot: how many of them there are

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        output = torch.tensor(list(start.output_ids), dtype=torch.int64)
        prompt = start.prompt_ids if start.params.repetition_penalty != 1.0 else ()
        seen = torch.tensor([*dict.fromkeys(prompt), *start.output_ids], dtype=torch.int64)
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
        entries = _flat(logits)
        at = rows.rows[:, None] * logits.stride(0) + ids
        chosen = _picked(entries, at)
        penalties = [_penalties_of(draw.params) for draw in rows.draws]
        repetition, frequency, presence = to_device(torch.tensor(penalties), self.device)[:, :, None].unbind(1)
        if any(draw.params.repetition_penalty != 1.0 for draw in rows.draws):
            chosen = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
        if any(draw.params.frequency_penalty or draw.params.presence_penalty for draw in rows.draws):
            counts = _picked(_flat(self._counts.values), rows.slots[:, None] * self.vocab_size + ids)
            chosen -= frequency * counts
            chosen -= presence * (counts > 0)
        entries.scatter_(0, at.flatten(), chosen.flatten())

    def _seen_ids(self, rows: Rows) -> Tensor:
        """Return the ids to penalise -> int64 [n, L]; shorter rows repeat their first one."""
        lengths = [self._lengths[draw.slot] for draw in rows.draws]
        seen = self._seen.values[:, : max(lengths)].index_select(0, rows.slots)
        if min(lengths) < max(lengths):
            is_padding = torch.arange(max(lengths), device=self.device) >= _column(lengths, self.device)
            seen = torch.where(is_padding, seen[:, :1], seen)
        return seen

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        slots = [draw.slot for draw in rows.draws]
        ends = [self._lengths[slot] for slot in slots]
        self._seen.reserve(0, max(ends) + 1)
        self._seen.values[rows.slots, to_device(torch.tensor(ends), self.device)] = drawn
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


def _penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _flat(table: Tensor) -> Tensor:
    """Return the entries of a table [R, columns] whose rows may be apart, as a view in one dimension."""
    assert table.stride(1) == 1
    return table.as_strided(((table.shape[0] - 1) * table.stride(0) + table.shape[1],), (1,))


def _picked(entries: Tensor, at: Tensor) -> Tensor:
    """Return the entries at the indices ``at`` [n, L], which is faster than by two indices each."""
    return entries.index_select(0, at.flatten()).view(at.shape)


def _column(numbers: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers), device)[:, None]
