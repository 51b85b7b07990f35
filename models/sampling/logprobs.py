"""Log-probabilities of a step's tokens, by its raw logits: computed on the device, read with the drawn tokens.

Those of drawn tokens come from the logits that the step draws from, those of prompt tokens from rows of logits that are
computed in pieces, so that a long chunk needs no memory for all of them at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.kernels.sampling import ScoreTokens
from splitserve.models.sampling.feature import to_device
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.step import SampleSpec, ScheduledChunk

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON can't express."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of N tokens and, in each position, of the K most probable ones, best first."""

    values: Tensor  # float32 [N, 1 + K]
    top_ids: Tensor  # int64 [N, K]

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, num_top: int, score_tokens: ScoreTokens) -> "Scores":
        """Score ``token_ids``, int64 [N], and the ``num_top`` best by raw logits [N, vocab]."""
        values, top_ids = score_tokens(logits, token_ids, num_top)
        return cls(values.clamp_(min=LOWEST), top_ids)

    def packed(self) -> Tensor:
        """Return all numbers as int64 [N * (1 + 2 K)], for :func:`unpacked`."""
        bits = self.values.view(torch.int32).flatten()
        return torch.cat((bits.to(torch.int64), self.top_ids.flatten()))


def unpacked(numbers: Int64Array, num_rows: int) -> Logprobs:
    """Return what :meth:`Scores.packed` packed of ``num_rows`` tokens."""
    num_top = (len(numbers) // num_rows - 1) // 2
    num_values = num_rows * (1 + num_top)
    values = numbers[:num_values].astype(np.int32).view(np.float32).reshape(num_rows, 1 + num_top)
    return Logprobs.of(values, numbers[num_values:].reshape(num_rows, num_top))


class RawDraws:
    """The raw logits of the draws that want log-probabilities, kept while features change the step's logits."""

    def __init__(self, logits: Tensor, rows: Sequence[int], num_tops: Sequence[int], score_tokens: ScoreTokens) -> None:
        """``logits`` [n, vocab] are those of ``rows``; nothing changes them any more."""
        self.rows = rows  # in the logits of the step's draws
        self.num_tops = num_tops
        self.num_numbers = len(rows) * (1 + 2 * min(max(num_tops), logits.shape[1]))  # in the packed scores
        self._logits = logits
        self._score_tokens = score_tokens

    @classmethod
    def of(
        cls, logits: Tensor, specs: Sequence[SampleSpec], score_tokens: ScoreTokens, *, changes: bool
    ) -> "RawDraws | None":
        """Take those of a step's draws, ``logits`` [R, vocab]; None if none wants any. ``changes``: whether ``logits``
        do before :meth:`scores` is called."""
        wanted = [(row, spec.num_top_logprobs) for row, spec in enumerate(specs) if spec.num_top_logprobs is not None]
        if not wanted:
            return None
        rows = [row for row, _ in wanted]
        if len(rows) < len(specs):
            logits = logits[to_device(torch.tensor(rows), logits.device)]
        elif changes:
            logits = logits.clone()
        return cls(logits, rows, [num_top for _, num_top in wanted], score_tokens)

    def scores(self, drawn: Tensor) -> Scores:
        """Return those of the drawn tokens, int64 [R]; a failed row has any token's."""
        if len(self.rows) < len(drawn):
            drawn = drawn[to_device(torch.tensor(self.rows), drawn.device)]
        return Scores.of(self._logits, drawn.clamp(min=0), max(self.num_tops), self._score_tokens)

    def split(self, numbers: Int64Array) -> Mapping[int, Logprobs]:
        """Return the packed scores by row of the step's draws."""
        every = unpacked(numbers, len(self.rows))
        pairs = enumerate(zip(self.rows, self.num_tops, strict=True))
        return {row: every.between(index, index + 1).narrowed(num_top) for index, (row, num_top) in pairs}


class PromptRows:
    """The rows of a step that score prompt tokens. The model passes their logits to :meth:`take`, in pieces."""

    def __init__(
        self, chunks: Sequence[ScheduledChunk], device: torch.device, score_tokens: ScoreTokens, *, is_lead: bool
    ) -> None:
        self._score_tokens = score_tokens
        self._is_lead = is_lead
        self.num_drawing = sum(chunk.sample is not None for chunk in chunks)
        self.counts: dict[int, tuple[int, int]] = {}  # tokens and alternatives of each chunk that scores any
        self.rows: list[int] = []  # in the step's flat batch
        token_ids: list[int] = []
        first = 0
        for index, chunk in enumerate(chunks):
            if chunk.scored is not None:
                start, count = first + chunk.scored.first_row, len(chunk.scored.token_ids)
                self.counts[index] = count, chunk.scored.num_top
                self.rows.extend(range(start, start + count))
                token_ids.extend(chunk.scored.token_ids)
            first += len(chunk.token_ids)
        self._token_ids = to_device(torch.tensor(token_ids, dtype=torch.int64), device)
        self._num_top = max(num_top for _, num_top in self.counts.values())
        self._pieces: list[Scores] = []
        self._num_taken = 0

    @classmethod
    def of(
        cls, chunks: Sequence[ScheduledChunk], device: torch.device, score_tokens: ScoreTokens, *, is_lead: bool
    ) -> "PromptRows | None":
        """Return the rows of a step's chunks; None if they score no prompt tokens. Unless ``is_lead`` nothing is kept:
        the rank only takes part in the computation of logits."""
        if all(chunk.scored is None for chunk in chunks):
            return None
        return cls(chunks, device, score_tokens, is_lead=is_lead)

    def take(self, logits: Tensor) -> None:
        """Score the next rows by their raw logits [N, vocab]."""
        if not self._is_lead:
            return
        end = self._num_taken + logits.shape[0]
        token_ids = self._token_ids[self._num_taken : end]
        self._pieces.append(Scores.of(logits, token_ids, self._num_top, self._score_tokens))
        self._num_taken = end

    def scores(self) -> Scores:
        """Return the scores of all rows."""
        assert self._num_taken == len(self.rows), f"{self._num_taken} rows of {len(self.rows)} were scored"
        values, top_ids = zip(*((piece.values, piece.top_ids) for piece in self._pieces), strict=True)
        return Scores(torch.cat(values), torch.cat(top_ids))

    def split(self, numbers: Int64Array) -> Mapping[int, Logprobs]:
        """Return the packed scores by chunk."""
        every, start, found = unpacked(numbers, len(self.rows)), 0, {}
        for chunk, (count, num_top) in self.counts.items():
            found[chunk] = every.between(start, start + count).narrowed(num_top)
            start += count
        return found


class StepScores:
    """All log-probabilities of a step: what follows its drawn tokens in the copy to the host."""

    def __init__(self, draws: RawDraws | None, prompts: PromptRows | None) -> None:
        self._draws = draws
        self._prompts = prompts

    def packed(self, drawn: Tensor | None) -> list[Tensor]:
        """Return the numbers as int64 tensors, for :meth:`read`; ``drawn`` int64 [R] are the step's drawn tokens."""
        numbers = []
        if self._draws is not None:
            assert drawn is not None
            numbers.append(self._draws.scores(drawn).packed())
        if self._prompts is not None:
            numbers.append(self._prompts.scores().packed())
        return numbers

    def read(self, numbers: Int64Array) -> tuple[Mapping[int, Logprobs], Mapping[int, Logprobs]]:
        """Return the drawn tokens' by row of the draws, and the prompts' by chunk, once ``numbers`` are on the host."""
        drawn: Mapping[int, Logprobs] = {}
        if self._draws is not None:
            drawn = self._draws.split(numbers[: self._draws.num_numbers])
            numbers = numbers[self._draws.num_numbers :]
        return drawn, {} if self._prompts is None else self._prompts.split(numbers)
