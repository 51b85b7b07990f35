"""Operations on logits: masks, penalties, log-probabilities, and draws.

Batched sampling: greedy, temperature, top-k, top-p, with draws that depend only on their key.

A draw is Gumbel-max: the token with the largest ``logit / temperature + gumbel``, where the Gumbel noise of a token is
a function of (seed, choice, position, token id) (:mod:`splitserve.kernels.reference.philox`). It is an exact draw from
the softmax, and the same on every worker, in every batch and for every attempt.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.kernels.reference import philox
from splitserve.kernels.sampling import FORBIDDEN, IN_PROMPT, SamplingBatch

NOT_FINITE = -1
MAX_LANES = 1 << 13
"""Tokens whose noise is computed together, those of several rows of a small vocabulary: one operation on all takes
about as long as one on a row. Rows of a larger one are drawn one after another, with noise for tokens that passed the
filters alone."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See :class:`splitserve.kernels.sampling.Sample`."""
    best, token_ids = logits.max(dim=-1)  # a NaN anywhere in a row makes its maximum NaN
    finite = best.isfinite()
    is_finite = finite.tolist()
    random_rows = [row for row, heat in enumerate(batch.temperatures) if heat > 0.0 and is_finite[row]]
    size = max(1, MAX_LANES // logits.shape[1])
    for start in range(0, len(random_rows), size):
        rows = random_rows[start : start + size]
        token_ids[rows] = _draw(_scaled(logits, rows, batch), rows, batch)
    return token_ids.masked_fill_(~finite, NOT_FINITE)


def gumbel(words: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64, from 32-bit words: ``-log(-log(u))`` with u in the middle of 2**-32
    steps."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def _draw_key(batch: SamplingBatch, row: int) -> tuple[int, int, int]:
    return batch.seeds[row], batch.choices[row], batch.positions[row]


def _scaled(logits: Tensor, rows: Sequence[int], batch: SamplingBatch) -> Tensor:
    temperatures = torch.tensor([batch.temperatures[row] for row in rows], dtype=torch.float64)
    return logits[list(rows)].double() / temperatures.to(logits.device).unsqueeze(1)


def _draw(scaled: Tensor, rows: Sequence[int], batch: SamplingBatch) -> Tensor:
    """Draw a token for each of ``rows``, whose scaled logits are ``scaled``."""
    keys = [_draw_key(batch, row) for row in rows]
    top_ks, top_ps = [batch.top_ks[row] for row in rows], [batch.top_ps[row] for row in rows]
    if len(rows) == 1 and (top_ks[0] > 0 or top_ps[0] < 1.0):  # of a large vocabulary, few tokens pass
        ids = (scaled[0] >= _threshold(scaled[0], top_ks[0], top_ps[0])).nonzero().squeeze(1)
        return ids[(scaled[0, ids] + gumbel(philox.words_of_ids(ids, *keys[0]))).argmax()].unsqueeze(0)
    scores = scaled + gumbel(philox.words_of_rows(scaled.shape[1], keys, scaled.device))
    if any(top_k > 0 or top_p < 1.0 for top_k, top_p in zip(top_ks, top_ps, strict=True)):
        scores.masked_fill_(scaled < keep_thresholds(scaled, top_ks, top_ps).unsqueeze(1), -math.inf)
    return scores.argmax(1)


def keep_thresholds(scaled: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Return the smallest logit that top-k and then top-p keep in each row of ``scaled`` (float64 [R, vocab]), [R].

    Top-k keeps the k largest. Of these, top-p keeps the smallest set of largest tokens whose probability reaches p.
    Ties at the threshold are all kept, so the result doesn't depend on any order.
    """
    return torch.stack([_threshold(*row) for row in zip(scaled, top_ks, top_ps, strict=True)])


def _threshold(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    vocab_size = logits.shape[0]
    if 0 < top_k < vocab_size:
        candidates = logits.topk(top_k).values
        log_total = candidates.logsumexp(0)
    elif top_p < 1.0:
        # Tokens below (1 - p) / vocab together have less than 1 - p: the set that reaches p lies above; only that is
        # sorted.
        log_total = logits.logsumexp(0)
        possible = logits >= log_total + math.log((1.0 - top_p) / vocab_size)
        candidates = logits[possible].sort(descending=True).values
    else:
        return logits.min()
    if top_p >= 1.0:
        return candidates[-1]
    weights = (candidates - log_total).exp_()
    mass_before = weights.cumsum(0).sub_(weights)
    num_kept = (mass_before < top_p).sum().clamp_(min=1)
    return candidates[num_kept - 1]


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See :class:`splitserve.kernels.sampling.MaskLogits`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).view(bits.shape[0], -1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, FORBIDDEN)


def penalise_logits(logits: Tensor, rows: Tensor, slots: Tensor, occurrences: Tensor, penalties: Tensor) -> None:
    """See :class:`splitserve.kernels.sampling.PenaliseLogits`."""
    repetition, frequency, presence = penalties[:, :, None].unbind(1)
    found, raw = occurrences[slots], logits[rows]
    counts = found & (IN_PROMPT - 1)
    changed = torch.where(raw < 0, raw * repetition, raw / repetition)
    changed -= frequency * counts
    changed -= presence * (counts > 0)
    logits[rows] = torch.where(found != 0, changed, raw)


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """See :class:`splitserve.kernels.sampling.ScoreTokens`."""
    logprobs = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    return torch.cat((logprobs.gather(1, token_ids[:, None]), top.values), dim=1), top.indices
