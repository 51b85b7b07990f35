"""Penalties for tokens that occurred: repetition (prompt and output), presence and frequency (output only).

Only the logits of tokens that occurred are touched. There are two forms, which compute the same: on a CPU arrays of
each sequence's distinct tokens, on a GPU tables, since a step may be launched there before the last token is known.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.sampling import IN_PROMPT, PenaliseLogits
from splitserve.models.sampling.feature import Feature, Float32Array, Int64Array, LogitKernels, Rows, to_device
from splitserve.models.sampling.slots import SlotTable
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart


class Penalties(Feature):
    """``repetition_penalty`` as in Keskar et al. (2019), then ``presence_penalty`` and ``frequency_penalty`` as in
    OpenAI's API."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._form: Feature = HostPenalties(vocab_size, device)

    def open(self, model_dir: Path | None, kernels: LogitKernels) -> None:
        """See :meth:`Feature.open`."""
        del model_dir
        if self.device.type != "cpu":
            self._form = DevicePenalties(self.vocab_size, self.device, kernels.penalise_logits)

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
    """The form for a GPU: a slot keeps how often each token of the vocabulary occurred."""

    def __init__(self, vocab_size: int, device: torch.device, penalise_logits: PenaliseLogits) -> None:
        super().__init__(vocab_size, device)
        self._penalise_logits = penalise_logits
        self._occurrences = SlotTable(vocab_size, torch.int32, device)  # as for PenaliseLogits
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def begin(self, slot: int, start: FeatureStart) -> None:
        """See :meth:`Feature.begin`."""
        prompt, output = (
            torch.tensor(list(ids), dtype=torch.int64) for ids in (_penalised_prompt(start), start.output_ids)
        )
        self._occurrences.reserve(slot + 1)
        occurrences = self._occurrences.row(slot).zero_()
        occurrences.index_fill_(0, to_device(prompt, self.device), IN_PROMPT)
        occurrences.index_add_(0, to_device(output, self.device), self._one.expand(len(output)))

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """See :meth:`Feature.apply`."""
        penalties = torch.tensor([_penalties_of(draw.params) for draw in rows.draws])
        table = self._occurrences.values
        self._penalise_logits(logits, rows.rows, rows.slots, table, to_device(penalties, self.device))

    def advance(self, rows: Rows, drawn: Tensor) -> None:
        """See :meth:`Feature.advance`."""
        at = rows.slots * self.vocab_size + rows.tokens(drawn)
        self._occurrences.values.view(-1).scatter_add_(0, at, self._one.expand(len(at)))

    def state(self, slot: int) -> object:
        """See :meth:`Feature.state`."""
        return self._occurrences.row(slot).tolist()


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


def _entries(table: Float32Array) -> tuple[Float32Array, int]:
    """Return the entries of a table [R, columns] as a view in one dimension, and those from one row to the next."""
    if table.flags.c_contiguous:
        return table.reshape(-1), table.shape[1]
    pitch = table.strides[0] // table.itemsize
    length = (table.shape[0] - 1) * pitch + table.shape[1]
    return np.lib.stride_tricks.as_strided(table[0], (length,), (table.itemsize,)), pitch
