"""Sampling: greedy, filters against a naive oracle, draws that depend on their key alone, the right distribution."""

import math
import random

import pytest
import torch

from splitserve.kernels.reference import philox
from splitserve.kernels.reference.sampling import NOT_FINITE, gumbel, keep_thresholds, sample
from splitserve.kernels.sampling import SamplingBatch

pytestmark = pytest.mark.usefixtures("one_thread")

Row = tuple[float, int, float, int, int, int]  # temperature, top_k, top_p, seed, choice, position


def batch(rows: list[Row]) -> SamplingBatch:
    return SamplingBatch(*(list(column) for column in zip(*rows, strict=True)))


def kept_by_oracle(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """Top-k, then top-p, by sorting everything; ties at either threshold are kept."""
    ranked = sorted(logits, reverse=True)
    if top_k:
        floor = ranked[min(top_k, len(ranked)) - 1]
        ranked = ranked[: min(top_k, len(ranked))]
    else:
        floor = ranked[-1]
    if top_p < 1.0:
        largest = ranked[0]
        weights = [math.exp(value - largest) for value in ranked]
        reached, total = 0.0, sum(weights)
        for value, weight in zip(ranked, weights, strict=True):
            floor = value
            reached += weight
            if reached >= top_p * total:
                break
    return {index for index, value in enumerate(logits) if value >= floor}


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.randn(5, 1001, generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, batch([(0.0, 3, 0.5, seed, 0, 9) for seed in range(5)]))
    assert drawn.dtype == torch.int64 and torch.equal(drawn, logits.argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [2, 100, 3000, 20000])
def test_filters_keep_what_the_oracle_keeps(vocab_size: int) -> None:
    chooser = random.Random(vocab_size)
    spread = torch.tensor([[0.01], [1.0], [5.0], [30.0]])
    logits = torch.randn(4, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * spread
    for _ in range(12):
        top_ks = [chooser.choice([0, 1, 2, 17, 999, 1500, vocab_size, 10**9]) for _ in range(4)]
        top_ps = [chooser.choice([1.0, 0.999, 0.9, 0.5, 1e-9]) for _ in range(4)]
        thresholds = keep_thresholds(logits, top_ks, top_ps)
        for row in range(4):
            kept = set((logits[row] >= thresholds[row]).nonzero().squeeze(1).tolist())
            assert kept == kept_by_oracle(logits[row].tolist(), top_ks[row], top_ps[row]), (
                top_ks[row],
                top_ps[row],
            )


def test_ties_at_the_threshold_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]], dtype=torch.float64)
    assert float(keep_thresholds(logits, [3], [1.0])) == 2.0
    assert float(keep_thresholds(logits, [1], [1.0])) == 3.0
    assert float(keep_thresholds(logits, [0], [0.5])) == 3.0


def test_a_draw_depends_on_its_key_and_not_on_the_batch() -> None:
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(2)) * 3
    chooser = random.Random(0)
    rows: list[Row] = [
        (
            chooser.choice([0.0, 0.3, 1.0, 2.0]),
            chooser.choice([0, 5, 50]),
            chooser.choice([1.0, 0.9]),
            chooser.getrandbits(64),
            chooser.randrange(3),
            chooser.randrange(10**6),
        )
        for _ in range(12)
    ]
    together = sample(logits, batch(rows)).tolist()
    order = list(range(12))
    chooser.shuffle(order)
    shuffled = sample(logits[order], batch([rows[index] for index in order])).tolist()
    alone = [int(sample(logits[index : index + 1], batch([rows[index]]))) for index in range(12)]
    assert together == alone
    assert shuffled == [alone[index] for index in order]


def test_filters_that_keep_everything_draw_the_same_token_as_no_filter() -> None:
    logits = torch.randn(1, 4000, generator=torch.Generator().manual_seed(3))
    for position in range(20):
        free = sample(logits, batch([(1.0, 0, 1.0, 7, 0, position)]))
        filtered = sample(logits, batch([(1.0, 4000, 1.0, 7, 0, position)]))
        assert torch.equal(free, filtered)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.8), (1.5, 4, 1.0)])
def test_draws_follow_the_softmax(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    num_draws = 4000
    rows: list[Row] = [(temperature, top_k, top_p, 11, 0, position) for position in range(num_draws)]
    drawn = sample(logits.expand(num_draws, -1), batch(rows))
    kept = kept_by_oracle((logits / temperature).tolist(), top_k, top_p)
    weights = [math.exp(value / temperature) if index in kept else 0.0 for index, value in enumerate(logits.tolist())]
    counts = torch.bincount(drawn, minlength=8).tolist()
    chi_square = 0.0
    for count, weight in zip(counts, weights, strict=True):
        expected = num_draws * weight / sum(weights)
        assert weight > 0 or count == 0
        chi_square += (count - expected) ** 2 / expected if weight else 0.0
    assert chi_square < 40  # at most 7 degrees of freedom: about 1 in 1,000,000


def test_gumbel_noise_is_finite_at_both_ends() -> None:
    ends = gumbel(torch.tensor([0, 2**32 - 1]))
    assert ends.isfinite().all() and float(ends[0]) < -3 and float(ends[1]) > 22


def test_noise_is_keyed_by_token_id() -> None:
    """The drawn token is the argmax of logits plus the noise that each id has by itself."""
    logits = torch.randn(1, 777, generator=torch.Generator().manual_seed(4))
    noise = torch.stack([gumbel(philox.words_of_ids(torch.tensor([token]), 5, 1, 42))[0] for token in range(777)])
    expected = int((logits[0].double() / 0.9 + noise).argmax())
    assert int(sample(logits, batch([(0.9, 0, 1.0, 5, 1, 42)]))) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_rows_that_are_not_finite_are_reported(temperature: float, top_k: int) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = math.nan
    logits[2, 4] = math.inf
    drawn = sample(logits, batch([(temperature, top_k, 1.0, 0, 0, 0)] * 3)).tolist()
    assert drawn[0] >= 0 and drawn[1:] == [NOT_FINITE, NOT_FINITE]
