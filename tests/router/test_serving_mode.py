"""The serving mode: what aggregated and disaggregated workers hold, and when the router goes from one to the other."""

import pytest

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.router.placement.cost import cost
from splitserve.router.placement.modes.arrangements import Arrangements, Pool, Sizes, slow_wait
from splitserve.router.placement.modes.recent_sizes import RATE_SECONDS, RecentSizes
from splitserve.router.placement.modes.serving_mode import NUM_REVIEWS, REVIEW_SECONDS, ServingMode
from splitserve.router.placement.policies import Disaggregated, Local, RequestShape, Snapshot
from splitserve.router.requests.objectives import Objectives
from worker_views import view

PREFILL = StepModel(3.5e-3, 2e-5, 4.7e-8, 20.5e-6, 1.6e-9, 1000, saved_beside=2.5e-6)
DECODE = StepModel(5.4e-3, 0.0, 4.7e-8, 20.5e-6, 1.6e-9, 1000, saved_beside=2.5e-6)
"""An 8B model on an H100, as workers of one phase fit it."""
SIZES = {"max_model_len": 16_384, "kv_capacity_tokens": 400_000, "max_num_seqs": 256, "chunk_tokens": 8192}
CHUNKS = {"shared_chunk_tokens": 320, "sized_chunk_tokens": 576}
LONG_OUTPUTS, LONG_PROMPTS = (2048, 512), (8192, 64)
LOOSE, STRICT = Objectives(0.5, 0.03), Objectives(0.5, 0.01)


def worker(name, role, **fields):
    model = PREFILL if role is Role.PREFILL else DECODE
    return view(name, role, **(SIZES | CHUNKS | {"step_model": model} | fields))


WORKERS = (worker("p", Role.PREFILL), worker("d", Role.DECODE))


def arrangements(sizes, objectives, *, prefills=1, decodes=1):
    num_tokens, num_outputs = sizes
    pools = [
        Pool.of([worker(f"{role}{number}", role) for number in range(count)])
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    ]
    return Arrangements(*pools, Sizes(num_tokens, num_tokens, num_tokens, num_outputs), objectives)


@pytest.mark.parametrize(
    ("sizes", "objectives", "better"),
    [
        (LONG_OUTPUTS, STRICT, "disaggregated"),
        (LONG_OUTPUTS, LOOSE, "aggregated"),
        (LONG_PROMPTS, Objectives(1.0, 0.015), "disaggregated"),
        (LONG_PROMPTS, Objectives(1.0, 0.03), "disaggregated"),
        ((1000, 1000), Objectives(0.5, 0.01), "disaggregated"),
        ((512, 256), LOOSE, "aggregated"),
    ],
)
def test_the_better_arrangement_is_that_of_the_twin(sizes, objectives, better):
    """Twins with steps as measured on an H100 and loads of a minute say which (decision 032)."""
    found = arrangements(sizes, objectives)
    rates = {"disaggregated": found.disaggregated(), "aggregated": found.aggregated()}
    assert max(rates, key=rates.get) == better
    assert max(rates.values()) > 1.05 * min(rates.values())


@pytest.mark.parametrize("sizes", [LONG_OUTPUTS, LONG_PROMPTS, (1000, 1000), (64, 2)])
def test_looser_objectives_and_more_workers_hold_more(sizes):
    before = (0.0, 0.0)
    for itl in (0.009, 0.012, 0.015, 0.02, 0.03, 0.06):
        found = arrangements(sizes, Objectives(1.0, itl))
        rates = found.disaggregated(), found.aggregated()
        assert all(rate >= 0.97 * other for rate, other in zip(rates, before, strict=True)), itl
        before = rates
        more = arrangements(sizes, Objectives(1.0, itl), prefills=3, decodes=3)
        assert more.disaggregated() >= 2.5 * rates[0] and more.aggregated() >= 2.5 * rates[1], itl


def test_workers_of_a_role_that_is_too_small_do_more_in_the_aggregate():
    few = arrangements((200, 1000), LOOSE, prefills=3, decodes=1)
    assert few.outputs() < few.disaggregated() and few.aggregated() > 1.02 * few.outputs()


def test_objectives_that_no_worker_keeps_hold_nothing():
    found = arrangements(LONG_OUTPUTS, Objectives(0.01, 0.001))
    assert found.disaggregated() == pytest.approx(0.0, abs=0.1) == found.aggregated()


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e6])
def test_no_model_that_a_worker_can_send_stops_the_router(seconds):
    liar = StepModel.of([seconds] * 6, 1000)
    for prefill, decode in ((liar, DECODE), (PREFILL, liar), (liar, liar)):
        workers = (worker("p", Role.PREFILL, step_model=prefill), worker("d", Role.DECODE, step_model=decode))
        for sizes in (LONG_OUTPUTS, (1, 1)):
            ServingMode(LOOSE).review(workers, True, *at_rate(12.0, sizes))


def test_the_slow_waits_of_one_worker_with_equal_times():
    """One wait of a hundred is longer than 10.4 services in an M/D/1 queue that is busy for 0.8 of the time."""
    assert slow_wait(0.8, 1, 1.0) == pytest.approx(10.4, rel=0.07)
    assert slow_wait(1.6, 2, 1.0) < slow_wait(0.8, 1, 1.0)
    assert slow_wait(0.001, 1, 1.0) == 0.0 and slow_wait(1.0, 1, 1.0) == float("inf")


def at_rate(rate, sizes=LONG_OUTPUTS, *, seconds=30.0, begin=0.0, recent=None):
    """Return the sizes of a load that has lasted so long, and the time then."""
    recent = recent or RecentSizes()
    for number in range(int(rate * seconds)):
        recent.note_prompt(sizes[0], 0, begin + number / rate)
        recent.note_output(sizes[1])
    return recent, begin + seconds


def mode_at(rate, objectives=LOOSE, workers=WORKERS, *, alike=True, reviews=NUM_REVIEWS):
    mode = ServingMode(objectives)
    recent, now = at_rate(rate)
    for _ in range(reviews):
        mode.review(workers, alike, recent, now)
    return mode


def test_a_single_review_does_not_change_the_mode():
    mode = mode_at(12.0, reviews=1)
    assert not mode.is_aggregated and mode.held is not None
    mode.review(WORKERS, True, *at_rate(4.0))
    for number in range(NUM_REVIEWS):
        assert not mode.is_aggregated, f"only {number} in a row"
        mode.review(WORKERS, True, *at_rate(12.0))
    assert mode.is_aggregated


def test_serving_is_aggregated_under_load_where_it_holds_more():
    assert mode_at(12.0).is_aggregated
    assert not mode_at(12.0, STRICT).is_aggregated
    assert not mode_at(4.0).is_aggregated, "disaggregated workers hold that, too, with shorter gaps"
    assert tuple(mode_at(4.0).held) == pytest.approx((13.68, 14.85), abs=0.1)
    assert not mode_at(12.0, Objectives(0.02, 0.05)).is_aggregated, "no mode holds that"


def test_a_router_counts_the_load_of_the_others():
    mode, (recent, now) = ServingMode(LOOSE), at_rate(6.0)
    mode.review(WORKERS, True, recent, now)
    assert not mode.is_aggregated
    for _ in range(NUM_REVIEWS):
        mode.review(WORKERS, True, recent, now, routers=2.0)
    assert mode.is_aggregated


def test_what_cannot_be_compared_stays_disaggregated():
    young = worker("d", Role.DECODE, step_model=StepModel.of(DECODE.coefficients, 0))
    assert not mode_at(12.0, alike=False).is_aggregated and mode_at(12.0, alike=False).held is None
    assert not mode_at(12.0, workers=(WORKERS[0], young)).is_aggregated
    assert not mode_at(12.0, workers=(*WORKERS, worker("m", Role.MIXED))).is_aggregated
    assert not mode_at(12.0, workers=WORKERS[:1]).is_aggregated
    assert not ServingMode(Objectives(0.0, 0.03)).is_due(1e9)


def test_the_mode_changes_back_when_the_load_falls_or_the_workers_change():
    mode = mode_at(12.0)
    recent, now = at_rate(9.5, begin=30.0, recent=at_rate(12.0)[0])
    mode.review(WORKERS, True, recent, now)
    assert mode.is_aggregated, "between the low and the high load it stays as it is"
    recent, now = at_rate(3.0, begin=60.0, seconds=6 * RATE_SECONDS, recent=recent)
    mode.review(WORKERS, True, recent, now)
    assert not mode.is_aggregated
    mode = mode_at(12.0)
    mode.review(WORKERS[1:], True, *at_rate(12.0))
    assert not mode.is_aggregated


def test_reviews_are_apart():
    mode, (recent, now) = ServingMode(LOOSE), at_rate(12.0)
    assert mode.is_due(now)
    mode.review(WORKERS, True, recent, now)
    assert not mode.is_due(now + 0.9 * REVIEW_SECONDS) and mode.is_due(now + REVIEW_SECONDS)


def test_aggregated_requests_share_all_workers():
    """As mixed workers do: by what runs there, and by cached prefixes."""
    shape = RequestShape(2048, 512)
    busy = {"num_requests": 20, "num_decoding": 20, "context_tokens": 50_000, "decoding_tokens": 50_000}
    used = {"prompt_share": 0.5, "prompt_seconds": 0.05}
    prefill, decode = worker("p", Role.PREFILL, **used), worker("d", Role.DECODE, **busy)
    assert isinstance(cost(Snapshot((prefill, decode), LOOSE, 512.0), shape), Disaggregated)
    placed = cost(Snapshot((prefill, decode), LOOSE, 512.0, is_aggregated=True), shape)
    assert placed == Local(prefill.party)
    crowded = worker("p", Role.PREFILL, **(busy | {"num_requests": 30, "num_decoding": 30, "decoding_tokens": 75_000}))
    assert cost(Snapshot((crowded, decode), LOOSE, 512.0, is_aggregated=True), shape) == Local(decode.party)
    cached = worker("p", Role.PREFILL, prefix_match_tokens=1984, **busy)
    assert cost(Snapshot((cached, decode), LOOSE, 512.0, is_aggregated=True), shape) == Local(cached.party)


def test_means_of_sizes_follow_the_load():
    recent, now = at_rate(10.0, (1000, 50))
    assert recent.prompt == pytest.approx(1000) and recent.output == pytest.approx(50, rel=0.2)
    assert recent.rate(now) == pytest.approx(10.0, rel=0.1)
    assert recent.rate(now + 10 * RATE_SECONDS) < 0.01
    for _ in range(200):
        recent.note_prompt(4000, 3000, now)
    assert recent.prompt == pytest.approx(4000, rel=0.05) and recent.computed == pytest.approx(1000, rel=0.02)


def test_long_prompts_count_by_their_tokens():
    recent = RecentSizes()
    for number in range(100):
        recent.note_prompt(8000 if number % 10 == 0 else 100, 0, 0.0)
    assert recent.long > 5 * recent.computed
