"""Penalties for tokens that occurred: repetition (prompt and output), presence and frequency (output only).

Only the logits of tokens that occurred are touched. There are two forms, which compute the same: on a CPU arrays of
each sequence's distinct tokens, on a GPU tables, since a step may be launched there before the last token is known.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from splitserve.models.sampling.feature import Draw, Feature, Float32Array, Int64Array, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart


class Penalties(Feature):
    """``repetition_penalty`` as in Keskar et al. (2019), then ``presence_penalty`` and ``frequency_penalty`` as in
    OpenAI's API."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._form: Feature = (HostPenalties if device.type == "cpu" else DevicePenalties)(vocab_size, device)

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        self._form.begin(slot, start)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        self._form.apply(logits, rows)

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        self._form.advance(rows, drawn)

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        self._form.end(slot)

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        return self._form.state(slot)


class Occurrences:
    """The distinct tokens of one sequence that are penalised, in the order of their first occurrences."""

    def __init__(self, start: FeatureStart) -> None:
        self._repetition, self._frequency, self._presence = map(np.float32, _penalties_of(start.params))
        self._numbers: dict[int, int] = {}  # by token its number in the order
        self.counts: list[int] = []  # by number: how often the output has the token
        self._ids: Int64Array = np.empty(0, np.int64)
        self._amounts = np.empty((3, 0), np.float32)
        self._append(dict.fromkeys(_penalised_prompt(start)))
        for token_id in start.output_ids:
            self.count(token_id)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def ids(self) -> Int64Array:
        """The tokens, int64 [n], a view."""
        return self._ids[: len(self.counts)]

    @property
    def amounts(self) -> Float32Array:
        """The tokens' penalties, float32 [3, n], a view: the divisor of the logit (factor of a negative one), and the
        amounts to subtract then, for the number in the output and for the presence there."""
        return self._amounts[:, : len(self.counts)]

    def count(self, token_id: int) -> None:
        """Count a token of the output."""
        number = self._numbers.get(token_id)
        if number is None:
            number = len(self.counts)
            self._append((token_id,))
        self.counts[number] += 1
        self._amounts[1, number] = self._frequency * np.float32(self.counts[number])
        self._amounts[2, number] = self._presence

    def _append(self, token_ids: Collection[int]) -> None:
        """Add new tokens, which the output lacks so far."""
        first, end = len(self.counts), len(self.counts) + len(token_ids)
        if end > len(self._ids):
            room = max(end, 2 * len(self._ids), 64)
            self._ids, self._amounts = np.resize(self._ids, room), _widened(self._amounts, room)
        self._numbers.update(zip(token_ids, range(first, end), strict=True))
        self.counts += [0] * len(token_ids)
        self._ids[first:end] = list(token_ids)
        self._amounts[:, first:end] = ((self._repetition,), (0,), (0,))


class HostPenalties(Feature):
    """The form for a CPU. Its steps are few operations on arrays of all sequences, most of which cost their call."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._occurrences: dict[int, Occurrences] = {}  # by slot

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        self._occurrences[slot] = Occurrences(start)

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        occurrences = [self._occurrences[draw.slot] for draw in rows.draws]
        at = np.concatenate([each.ids for each in occurrences])
        entries, pitch = _entries(logits.numpy())
        at += np.repeat([draw.row * pitch for draw in rows.draws], [len(each) for each in occurrences])
        repetition, for_number, for_presence = np.concatenate([each.amounts for each in occurrences], axis=1)
        chosen = entries.take(at)
        chosen = np.where(chosen < 0, chosen * repetition, chosen / repetition)
        chosen -= for_number
        chosen -= for_presence
        entries[at] = chosen

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        token_ids = drawn.tolist()
        for draw in rows.draws:
            self._occurrences[draw.slot].count(max(0, token_ids[draw.row]))

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._occurrences[slot]

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        occurrences = self._occurrences[slot]
        return occurrences.ids.tolist(), list(occurrences.counts), occurrences.amounts.tolist()


class DevicePenalties(Feature):
    """The form for a GPU: a slot keeps the ids of tokens that occurred, repeats included, and how often each token of
    the vocabulary is in the output. A repeated id computes and writes the same value once more."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._counts = SlotTable(vocab_size, torch.int32, device)  # of each token in the output
        self._seen = SlotTable(0, torch.int64, device)  # ids of tokens to penalise
        self._lengths: dict[int, int] = {}  # by slot: how many of them there are

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        output = torch.tensor(list(start.output_ids), dtype=torch.int64)
        seen = torch.tensor([*dict.fromkeys(_penalised_prompt(start)), *start.output_ids], dtype=torch.int64)
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
        if _has_repetition(rows.draws):
            chosen = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
        if _has_others(rows.draws):
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
        token_ids = rows.tokens(drawn)
        self._seen.reserve(0, max(ends) + 1)
        self._seen.values[rows.slots, to_device(torch.tensor(ends), self.device)] = token_ids
        self._counts.values[rows.slots, token_ids] += 1
        for slot in slots:
            self._lengths[slot] += 1

    def end(self, slot: int) -> None:
        """See :meth:`Feature.end`."""
        del self._lengths[slot]

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        length = self._lengths[slot]
        return self._seen.row(slot)[:length].tolist(), self._counts.row(slot).tolist()


def _penalised_prompt(start: FeatureStart) -> Sequence[int]:
    """Return the tokens of the prompt that are penalised where the output lacks them, too."""
    return start.prompt_ids if start.params.repetition_penalty != 1.0 else ()


def _penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _widened(table: Float32Array, columns: int) -> Float32Array:
    """Return a copy of a table [3, n] with room for more columns."""
    wider = np.empty((table.shape[0], columns), np.float32)
    wider[:, : table.shape[1]] = table
    return wider


def _has_repetition(draws: Sequence[Draw]) -> bool:
    return any(draw.params.repetition_penalty != 1.0 for draw in draws)


def _has_others(draws: Sequence[Draw]) -> bool:
    return any(draw.params.frequency_penalty or draw.params.presence_penalty for draw in draws)


def _flat(table: Tensor) -> Tensor:
    """Return the entries of a table [R, columns] whose rows may be apart, as a view in one dimension."""
    assert table.stride(1) == 1
    return table.as_strided(((table.shape[0] - 1) * table.stride(0) + table.shape[1],), (1,))


def _entries(table: Float32Array) -> tuple[Float32Array, int]:
    """Return the entries of a table [R, columns] as a view in one dimension, and those from one row to the next."""
    if table.flags.c_contiguous:
        return table.reshape(-1), table.shape[1]
    pitch = table.strides[0] // table.itemsize
    length = (table.shape[0] - 1) * pitch + table.shape[1]
    return np.lib.stride_tricks.as_strided(table[0], (length,), (table.itemsize,)), pitch


def _picked(entries: Tensor, at: Tensor) -> Tensor:
    """Return the entries at the indices ``at`` [n, L], which is faster than by two indices each."""
    return entries.index_select(0, at.flatten()).view(at.shape)


def _column(numbers: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers), device)[:, None]
