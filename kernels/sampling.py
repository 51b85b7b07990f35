"""Batched sampling: greedy, temperature, top-k, top-p, with draws that depend on nothing but their key.

A draw is Gumbel-max: the token with the largest ``logit / temperature + gumbel``, where the Gumbel noise of a token
is a function of (seed, choice, position, token id) (:mod:`splitserve.kernels.philox`). It is an exact draw from the
softmax, and the same on every worker, in every batch and for every attempt. Noise is computed only for tokens that
passed the filters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.kernels import philox
from splitserve.kernels.api import SamplingBatch

_FIRST_SORTED = 1024  # a nucleus is nearly always found among this many tokens; sorting the vocabulary costs 10x more
NOT_FINITE = -1


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See :class:`splitserve.kernels.api.Sample`."""
    best, token_ids = logits.max(dim=-1)
    random_rows = [row for row, temperature in enumerate(batch.temperatures) if temperature > 0.0]
    filtered = [row for row in random_rows if batch.top_ks[row] > 0 or batch.top_ps[row] < 1.0]
    if filtered:
        token_ids[filtered] = _draw_filtered(_scaled(logits, filtered, batch), filtered, batch)
    for row in sorted(set(random_rows).difference(filtered)):
        words = philox.words_of_range(logits.shape[1], *_draw_key(batch, row), logits.device)
        token_ids[row] = (_scaled(logits, [row], batch)[0] + gumbel(words)).argmax()
    return token_ids.masked_fill_(~best.isfinite(), NOT_FINITE)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, from 32-bit words: ``-log(-log(u))`` with u in the middle of 2**-32 steps."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def _draw_key(batch: SamplingBatch, row: int) -> tuple[int, int, int]:
    return batch.seeds[row], batch.choices[row], batch.positions[row]


def _scaled(logits: Tensor, rows: Sequence[int], batch: SamplingBatch) -> Tensor:
    temperatures = torch.tensor([batch.temperatures[row] for row in rows], dtype=torch.float64)
    return logits[list(rows)].double() / temperatures.to(logits.device).unsqueeze(1)


def _draw_filtered(scaled: Tensor, rows: Sequence[int], batch: SamplingBatch) -> Tensor:
    thresholds = keep_thresholds(scaled, [batch.top_ks[row] for row in rows], [batch.top_ps[row] for row in rows])
    kept = scaled >= thresholds.unsqueeze(1)
    drawn = []
    for index, row in enumerate(rows):
        ids = kept[index].nonzero().squeeze(1)
        noise = gumbel(philox.words_of_ids(ids, *_draw_key(batch, row)))
        drawn.append(ids[(scaled[index, ids] + noise).argmax()])
    return torch.stack(drawn)


def keep_thresholds(scaled: Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> Tensor:
    """Per row of ``scaled`` [R, vocab]: the smallest logit that top-k and then top-p keep, [R].

    Top-k keeps the k largest. Top-p keeps, of what top-k left, the smallest set of largest tokens whose probability
    reaches p. Ties at the threshold are all kept, so the result doesn't depend on any order.
    """
    vocab_size = scaled.shape[1]
    limits = [min(top_k, vocab_size) if top_k else vocab_size for top_k in top_ks]
    num_sorted = min(vocab_size, max(_FIRST_SORTED, *(limit for limit in limits if limit < vocab_size), 1))
    if num_sorted > vocab_size // 4:
        num_sorted = vocab_size
    limit = torch.tensor(limits, device=scaled.device).unsqueeze(1)
    top_p = torch.tensor(top_ps, dtype=scaled.dtype, device=scaled.device).unsqueeze(1)
    log_total = scaled.logsumexp(dim=1, keepdim=True)
    while True:
        largest = scaled.topk(num_sorted, dim=1).values
        in_top_k = torch.arange(num_sorted, device=scaled.device) < limit
        weights = (largest - log_total).exp_().masked_fill_(~in_top_k, 0.0)
        cumulative = weights.cumsum(dim=1)
        within_sorted = limit <= num_sorted
        total = torch.where(within_sorted, cumulative[:, -1:], 1.0)
        if num_sorted == vocab_size or bool((within_sorted | (cumulative[:, -1:] >= top_p)).all()):
            break
        num_sorted = vocab_size
    kept = in_top_k & ((cumulative - weights < top_p * total) | (top_p >= 1.0))
    last_kept = kept.sum(dim=1, keepdim=True) - 1
    return largest.gather(1, last_kept.clamp_(min=0)).squeeze(1)
