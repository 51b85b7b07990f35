"""The operations on logits, a part of :mod:`splitserve.kernels.api`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

FORBIDDEN = -1e30
"""The logit of a token that a grammar doesn't allow: finite, and below whatever a ban by another feature leaves."""
IN_PROMPT = 1 << 30
"""Added to the number of a token's occurrences in the output, where the prompt has the token, too."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of each row, as plain numbers."""

    temperatures: Sequence[float]  # 0: greedy
    top_ks: Sequence[int]  # 0: keep all
    top_ps: Sequence[float]
    seeds: Sequence[int]  # seed, choice and position are the key of a draw
    choices: Sequence[int]
    positions: Sequence[int]  # index of the drawn token in its sequence


class Sample(Protocol):
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Draw one token per row of ``logits`` [R, vocab], any float dtype -> ids int64 [R] on their device; -1 for a
        row that is not finite."""
        ...


class MaskLogits(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of forbidden tokens to :data:`FORBIDDEN`, in place.

        ``logits`` float32 [R, vocab]; ``rows`` int64 [n], distinct; ``bits`` int32 [n, vocab / 32, rounded up]: bit
        ``t % 32`` of word ``t // 32`` allows token ``t`` in that row.
        """
        ...


class PenaliseLogits(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, slots: Tensor, occurrences: Tensor, penalties: Tensor) -> None:
        """Penalise tokens that occurred, in place: first the division by the repetition penalty (a negative logit is
        multiplied), then frequency times the number in the output and presence, where that isn't 0, are subtracted.

        ``logits`` float32 [R, vocab]; ``rows`` int64 [n], distinct; ``slots`` int64 [n]: the rows of ``occurrences``,
        int32 [slots, vocab]: how often the output has each token, plus :data:`IN_PROMPT` for one of the prompt that is
        penalised. ``penalties`` float32 [n, 3]: repetition, frequency, presence. Other logits stay unchanged.
        """
        ...


class ScoreTokens(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of tokens and of the likeliest ones -> float32 [N, 1 + K], ids int64 [N, K].

        ``logits`` [N, vocab], any float dtype; ``token_ids`` int64 [N], within the vocabulary. K is ``num_top``, or the
        vocabulary's size if that is less. A token's own stands first, those of the likeliest follow, best first. All
        are NaN in a row that holds NaN, +inf, or nothing but -inf.
        """
        ...
