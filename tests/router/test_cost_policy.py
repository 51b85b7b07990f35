"""The policy by predicted cost, and what it predicts with: queues, trusted step models."""

import random

import pytest

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.cost import cost
from splitserve.router.placement.placer import Placer
from splitserve.router.placement.policies import (
    USUAL_OUTPUT_TOKENS,
    Disaggregated,
    Local,
    NoWorker,
    RequestShape,
    Snapshot,
)
from splitserve.router.placement.prefill_queue import BUSY_SECONDS, PrefillQueue
from splitserve.router.placement.step_models import TRUSTED_STEPS, Known, trusted_model
from splitserve.router.requests.objectives import Objectives
from worker_views import info, view

MODEL = StepModel(base=5e-3, per_decode=2e-5, per_context=3e-8, per_token=3e-5, per_pair=0.0, num_steps=1000)
OBJECTIVES = Objectives(ttft_seconds=0.5, tpot_seconds=0.02)
LONG, SHORT = RequestShape(4000, 100), RequestShape(20, 100)
SIZES = {"max_model_len": 10_000, "kv_capacity_tokens": 100_000, "max_num_seqs": 64, "step_model": MODEL}
LINKS = dict.fromkeys(("p", "p0", "p1", "p2", "p3"), 100000000000.0)
USED = {"prompt_share": 0.5, "prompt_seconds": 0.1, "shared_chunk_tokens": 64}
"""A prefill worker that computes prompts half of the time, in small steps beside outputs: it has no time for these."""


def worker(name, role, **fields):
    return view(name, role, **(SIZES | {"chunk_tokens": 512, "token_bytes": 1 << 17, "link_rates": LINKS} | fields))


def place(*workers, shape=LONG, objectives=OBJECTIVES):
    return cost(Snapshot(tuple(workers), objectives), shape)


def test_a_long_prompt_leaves_busy_decode_workers_in_peace():
    prefill, decode = worker("p", Role.PREFILL, **USED), worker("d", Role.DECODE, num_requests=32, num_decoding=32)
    assert place(prefill, decode) == Disaggregated(prefill.party, decode.party)


def test_a_short_prompt_is_computed_where_it_decodes_if_prefill_has_a_queue():
    prefill = worker("p", Role.PREFILL, queue_seconds=2.0, prefill_busy=1.0)
    decode = worker("d", Role.DECODE, num_requests=4, num_decoding=4)
    assert place(prefill, decode, shape=SHORT) == Local(decode.party)


def test_a_cached_prefix_is_worth_the_time_that_it_saves_and_no_more():
    decode = worker("d", Role.DECODE, num_requests=8, num_decoding=8)
    fresh = worker("p0", Role.PREFILL, num_placed=5, **USED)
    cached = worker("p1", Role.PREFILL, prefix_match_tokens=3500, queue_seconds=0.09, **USED)
    assert place(fresh, cached, decode).prefill == cached.party, "3,500 tokens take 0.1 s and more"
    crowded = worker("p1", Role.PREFILL, prefix_match_tokens=3500, queue_seconds=0.2, **USED)
    none = Objectives(0.0, 0.0)
    assert place(fresh, crowded, decode, objectives=none).parties[0] == fresh.party


def test_fast_and_slow_workers_get_what_they_can_do():
    slow = worker("p0", Role.PREFILL, step_model=StepModel(1e-2, 4e-5, 6e-8, 6e-5, 0.0, 1000), **USED)
    fast = worker("p1", Role.PREFILL, queue_seconds=0.05, **USED)
    decode = worker("d", Role.DECODE, num_requests=16, num_decoding=16)
    assert place(slow, fast, decode).prefill == fast.party
    assert place(slow, worker("p1", Role.PREFILL, queue_seconds=0.6, **USED), decode).prefill == slow.party


def test_the_least_busy_of_idle_workers_takes_a_prompt_and_a_busy_one_is_spared_computing():
    decode = worker("d", Role.DECODE, num_requests=8, num_decoding=8)
    none = Objectives(0.0, 0.0)
    busy, quiet = (
        worker("p0", Role.PREFILL, prefill_busy=0.6),
        worker("p1", Role.PREFILL, prefill_busy=0.3, num_placed=9),
    )
    assert place(busy, quiet, decode, objectives=none).parties[0] == quiet.party
    cached = worker("p2", Role.PREFILL, prefill_busy=0.6, prefix_match_tokens=3500, queue_seconds=0.14)
    assert place(quiet, cached, decode, objectives=none).parties[0] == cached.party, "0.1 s saved where it is busy"
    slow = worker("p2", Role.PREFILL, prefill_busy=0.0, prefix_match_tokens=3500, queue_seconds=0.14)
    fresh = worker("p1", Role.PREFILL, prefill_busy=0.0)
    assert place(fresh, slow, decode, objectives=none).parties[0] == fresh.party, "idle workers have time for it"


def test_decode_goes_where_gaps_stay_short():
    prefill = worker("p", Role.PREFILL, **USED)
    batch, memory = {"num_requests": 60, "num_decoding": 60}, {"context_tokens": 600_000, "decoding_tokens": 600_000}
    crowded = worker("d0", Role.DECODE, kv_capacity_tokens=10**6, **batch, **memory)
    assert place(prefill, crowded, worker("d1", Role.DECODE, num_placed=99)).decode == Party("d1", 1)
    full = worker("d0", Role.DECODE, num_requests=64, num_decoding=64)
    assert place(prefill, full, worker("d1", Role.DECODE, num_requests=50, num_decoding=50)).decode == Party("d1", 1)


def test_among_decode_workers_within_the_objectives_the_one_with_shorter_gaps_takes_the_request():
    """Though it was given more requests."""
    prefill, few = worker("p", Role.PREFILL, **USED), {"num_requests": 4, "num_decoding": 4, "num_placed": 90}
    many = worker("d0", Role.DECODE, num_requests=12, num_decoding=12)
    assert place(prefill, many, worker("d1", Role.DECODE, **few)).decode == Party("d1", 1)
    long = worker("d0", Role.DECODE, num_requests=4, num_decoding=4, context_tokens=40_000, decoding_tokens=40_000)
    assert place(prefill, long, worker("d1", Role.DECODE, **few)).decode == Party("d1", 1)


def test_without_objectives_a_prompt_that_makes_gaps_long_waits_for_prefill():
    """A gap counts by its ratio to a step, TTFT by its seconds; also if the only output is still on its way."""
    none, shape = Objectives(0.0, 0.0), RequestShape(500, 100)
    prefill = worker("p", Role.PREFILL, queue_seconds=0.05, **USED)
    idle, awaiting = worker("d", Role.DECODE), worker("d", Role.DECODE, num_requests=1)
    busy = worker("d", Role.DECODE, num_requests=4, num_decoding=4)
    assert place(prefill, idle, shape=shape, objectives=none) == Local(idle.party)
    assert place(prefill, awaiting, shape=shape, objectives=none) == Disaggregated(prefill.party, awaiting.party)
    assert place(prefill, busy, shape=shape, objectives=none) == Disaggregated(prefill.party, busy.party)
    short = RequestShape(20, 100)
    assert place(prefill, busy, shape=short, objectives=none) == Local(busy.party), "hardly longer than a step"
    long_queue = worker("p", Role.PREFILL, queue_seconds=5.0, **USED)
    assert place(long_queue, busy, shape=shape, objectives=none) == Local(busy.party)


def test_without_objectives_outputs_keep_off_prefill_workers_that_compute_prompts():
    none, shape = Objectives(0.0, 0.0), RequestShape(20, 100)
    decode = worker("d", Role.DECODE, num_requests=40, num_decoding=40, decoding_tokens=20_000)
    quiet = worker("p", Role.PREFILL, prompt_share=0.01, prompt_seconds=0.02)
    busy = worker("p", Role.PREFILL, prompt_share=0.6, prompt_seconds=0.02)
    assert place(quiet, decode, shape=shape, objectives=none) == Local(quiet.party)
    assert place(busy, decode, shape=shape, objectives=none) != Local(busy.party)


ROOMY = Objectives(ttft_seconds=1.0, tpot_seconds=0.03)


def test_a_prompt_waits_for_prefill_while_its_objective_leaves_time_and_then_decode_helps():
    """Nothing exceeds an objective on either route."""
    decode = worker("d", Role.DECODE, num_requests=16, num_decoding=16)
    places = [
        place(worker("p", Role.PREFILL, queue_seconds=queue, **USED), decode, objectives=ROOMY)
        for queue in (0.1, 0.3, 0.7, 0.8)
    ]
    assert places[:2] == [Disaggregated(Party("p", 1), decode.party)] * 2, "up to 0.2 s later than at decode"
    assert places[2:] == [Local(decode.party)] * 2


def test_the_objective_of_a_request_that_has_waited_is_nearer():
    decode = worker("d", Role.DECODE, num_requests=16, num_decoding=16)
    prefill = worker("p", Role.PREFILL, queue_seconds=0.3, **USED)
    waited = RequestShape(4000, 100, waited_seconds=0.4)
    assert place(prefill, decode, objectives=ROOMY) == Disaggregated(prefill.party, decode.party)
    assert place(prefill, decode, shape=waited, objectives=ROOMY) == Local(decode.party)


def test_a_link_of_unknown_speed_is_tried():
    """It was never measured: if that were held against it, it never would be."""
    prefill = worker("p", Role.PREFILL, **USED)
    decode = worker("d", Role.DECODE, num_requests=8, num_decoding=8, link_rates={})
    assert place(prefill, decode) == Disaggregated(prefill.party, decode.party)
    slow = worker("d", Role.DECODE, num_requests=8, num_decoding=8, link_rates={"p": 1e8})
    assert isinstance(place(prefill, slow), Local), "a hand-over of 1.3 s"


def test_outputs_go_to_a_prefill_worker_that_has_few_prompts():
    """They slow its prompts, which matters more the more of them come, and the more of the objective these need."""
    decode = worker("d", Role.DECODE, num_requests=40, num_decoding=40, context_tokens=80_000, decoding_tokens=80_000)
    shape = RequestShape(200, 100)

    def placed(**fields):
        return place(worker("p", Role.PREFILL, **fields), decode, shape=shape)

    few, many = {"prompt_share": 0.02, "prompt_seconds": 0.02}, {"prompt_share": 0.9, "prefill_busy": 0.9}
    assert placed(**few) == Local(Party("p", 1))
    assert placed(**many, prompt_seconds=0.02) == Disaggregated(Party("p", 1), decode.party)
    assert placed(prompt_share=0.02, prompt_seconds=0.6) == Disaggregated(Party("p", 1), decode.party)


@pytest.mark.parametrize("num_decoding", [0, 1, 2, 40])
def test_a_prefill_worker_decodes_only_where_that_saves_a_tenth_of_the_strain(num_decoding):
    """A cluster that seems idle may be at the begin of a load, which then would find its prompts in chunks."""
    running = {"num_requests": num_decoding, "num_decoding": num_decoding}
    tokens = {"context_tokens": 2000 * num_decoding, "decoding_tokens": 2000 * num_decoding}
    decode = worker("d", Role.DECODE, **running, **tokens)
    placed = place(worker("p", Role.PREFILL), decode, shape=RequestShape(2048, 512))
    assert (placed == Local(Party("p", 1))) == (num_decoding == 40), placed


def test_the_spare_time_of_a_prefill_worker_is_used_where_decode_is_full():
    prefill = worker("p", Role.PREFILL)
    full = worker("d", Role.DECODE, num_requests=128, num_decoding=64)
    slow = Objectives(0.0, 0.0)
    assert place(prefill, full, shape=SHORT, objectives=slow) == Local(prefill.party)
    busy = worker("p", Role.PREFILL, prefill_busy=1.0)
    decode = worker("d", Role.DECODE, num_requests=8, num_decoding=8)
    assert place(busy, decode, shape=SHORT, objectives=OBJECTIVES) != Local(busy.party)


def test_nobody_left_is_explained():
    assert place(worker("p", Role.PREFILL)) == NoWorker("no decode worker is ready")
    assert isinstance(place(worker("m", Role.MIXED, max_model_len=100)), NoWorker)


def test_a_worker_that_lies_is_held_near_its_pool():
    honest = [MODEL, MODEL, MODEL]
    liar = StepModel(1e-9, 1e-9, 0.0, 1e-9, 0.0, num_steps=10**6)
    held = trusted_model(Known(liar), [Known(each) for each in honest])
    assert held.base == MODEL.base / 4 and held.per_token == MODEL.per_token / 4
    prefills = [worker(f"p{n}", Role.PREFILL, queue_seconds=0.1 * n, **USED) for n in range(3)]
    deceiver = worker("p3", Role.PREFILL, step_model=held, queue_seconds=0.5, **USED)
    decode = worker("d", Role.DECODE, num_requests=8, num_decoding=8)
    assert place(*prefills, deceiver, decode).prefill == Party("p0", 1)


def test_few_steps_say_less_than_the_pool_and_an_estimate_is_better_than_nothing():
    new = StepModel(1.0, 1.0, 1.0, 1.0, 1.0, num_steps=TRUSTED_STEPS - 1)
    assert trusted_model(Known(new, new), [Known(MODEL)]).coefficients == MODEL.coefficients
    assert trusted_model(Known(new, new), []) is new
    assert trusted_model(Known(new, new), [Known(StepModel())]) is new
    # A single fit counts alike for its own worker and for others: else one would only seem quicker.
    bad = StepModel(9e-3, 1e-4, 5e-6, 5e-4, 1e-7, num_steps=200)  # some coefficients are beyond its bounds
    fitted, other = trusted_model(Known(bad, new), []), trusted_model(Known(new, new), [Known(bad, new)])
    assert fitted.coefficients == other.coefficients != bad.coefficients


def test_an_estimate_is_corrected_by_fits_of_workers_alike_where_its_role_has_none():
    """A roofline is too slow or too quick by the same factor for all roles of a device."""
    estimate = StepModel(1e-2, 4e-5, 6e-8, 6e-5, 1e-9)
    fit = StepModel(5e-3, 8e-5, 6e-8, 3e-5, 1e-9, num_steps=TRUSTED_STEPS)
    found = trusted_model(Known(estimate, estimate), [], [Known(fit, estimate)])
    assert found.coefficients == pytest.approx(fit.coefficients)
    wild = StepModel(1e-2, 4e-5, 6e-8, 1.0, 1e-9, num_steps=TRUSTED_STEPS)
    found = trusted_model(Known(estimate, estimate), [], [Known(wild, estimate)])
    assert found.per_token == pytest.approx(4 * estimate.per_token), "a wild fit is held"
    for unknown in (Known(fit), Known(estimate, estimate)):  # a router that was started again; no fit yet
        assert trusted_model(Known(estimate, estimate), [], [unknown]) is estimate
    own = StepModel(5e-3, 8e-5, 6e-8, 3e-5, 1e-9, num_steps=TRUSTED_STEPS)
    assert trusted_model(Known(own, estimate), [], [Known(wild, estimate)]).coefficients == own.coefficients


def test_the_first_prompt_of_a_queue_counts_less_with_time():
    queue = PrefillQueue()
    queue.add("a", 1.0, 10.0)
    queue.add("b", 2.0, 10.5)
    assert queue.seconds(10.5) == pytest.approx(2.5)
    assert queue.seconds(99.0) == pytest.approx(2.0), "the second one has not begun"
    queue.remove("a", 11.5)
    assert queue.seconds(12.0) == pytest.approx(1.5)
    queue.remove("b", 13.0)
    queue.remove("b", 13.0)
    assert queue.seconds(13.0) == 0.0 and not len(queue)
    assert queue.busy_share(13.0) == pytest.approx(3.0 / BUSY_SECONDS, rel=0.3)
    assert queue.busy_share(13.0 + 10 * BUSY_SECONDS) < 0.001


def test_what_is_known_of_the_prompts_to_come_is_right_from_the_first_one_on():
    queue = PrefillQueue()
    assert queue.outlook(5.0) == (0.0, 0.0, 0.0, 0.0)
    for second in range(4):
        queue.add(second, 0.3, 100.0 + second)
    seconds, share, since_first, prompt_seconds = queue.outlook(104.0)
    assert since_first == pytest.approx(0.3, rel=0.05)
    assert share == queue.busy_share(104.0) < 0.05, "which counts the time before"
    assert seconds == queue.seconds(104.0) and prompt_seconds == pytest.approx(0.3)
    queue.add("long", 2.7, 104.0)
    assert 1.6 < queue.outlook(104.0)[3] < 2.1, "most of the time goes to the long one"
    assert max(queue.outlook(100.0 + 10 * BUSY_SECONDS)[1:3]) < 0.01


def test_the_share_of_time_that_prompts_will_take_follows_a_load_that_comes_after_rest():
    queue = PrefillQueue()
    queue.add("early", 0.05, 0.0)
    queue.add("after rest", 0.06, 99.9)
    assert queue.outlook(99.95)[2] < 0.01, "one prompt is no load"
    for number in range(60):
        queue.add(number, 0.06, 100.0 + number / 10)
    _, share, expected, _ = queue.outlook(106.0)
    assert expected == pytest.approx(0.6, rel=0.15)
    assert share < 0.15, "what prompts took lately, on average over half a minute"
    assert queue.outlook(130.0)[2] < 0.1, "and forgets it"


def test_a_lull_of_two_seconds_does_not_hide_the_load_around_it():
    queue = PrefillQueue()
    queue.add("early", 0.04, 0.0)
    for number in range(96):
        queue.add(number, 0.04, 100.0 + number / 12)
    assert queue.outlook(108.0)[2] == pytest.approx(0.48, rel=0.05)
    for number in range(6):
        queue.add(("lull", number), 0.04, 108.0 + number / 3)
    assert queue.outlook(110.0)[2] == pytest.approx(0.41, rel=0.05)


@pytest.mark.parametrize(("rate", "seconds"), [(0.1, 0.4), (0.3, 0.4), (1.0, 0.2), (8.0, 0.06)])
def test_the_share_of_time_that_prompts_will_take_is_hardly_too_high_on_average(rate, seconds):
    """As arriving requests see it, which come at random."""
    chosen, queue, now, shares = random.Random(4), PrefillQueue(), 0.0, []
    for number in range(4000):
        now += chosen.expovariate(rate)
        if now > 100.0:
            shares.append(queue.outlook(now)[2])
        queue.add(number, seconds, now)
    assert sum(shares) / len(shares) == pytest.approx(rate * seconds, abs=0.05)


def test_a_few_short_outputs_do_not_decide_the_expected_length():
    placer = Placer(cost, None, None)
    for length in (1, 1, 1):
        placer.sizes.note_output(length)
    assert placer.sizes.output > 0.5 * USUAL_OUTPUT_TOKENS
    for _ in range(40):
        placer.sizes.note_output(500)
    assert placer.sizes.output == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize("num_workers", [2, 64])
def test_choices_spread_and_depend_on_the_snapshot_alone(num_workers):
    workers = [worker(f"p{n}", Role.PREFILL) for n in range(num_workers)] + [worker("d", Role.DECODE)]
    assert place(*workers) == place(*reversed(workers))
    assert info().max_num_batched_tokens == 0, "older benches say nothing about their steps"


class TestSessions:
    SESSIONS = tuple(f"session {number}" for number in range(60))

    def pairs(self, **fields):
        prefills = [worker(f"p{number}", Role.PREFILL, num_placed=number) for number in range(4)]
        return [*prefills, worker("d0", Role.DECODE, **fields), worker("d1", Role.DECODE, num_placed=9)]

    def placed(self, workers, session):
        return place(*workers, shape=RequestShape(4000, 100, session=session))

    def test_each_has_its_own_workers_whatever_was_placed_before(self):
        workers = self.pairs()
        first = {session: self.placed(workers, session) for session in self.SESSIONS}
        for each in workers:
            each.num_placed = 50 - each.num_placed
        assert all(self.placed(workers, session) == first[session] for session in self.SESSIONS)
        assert len({placement.prefill for placement in first.values()}) == 4, "and they spread"
        assert len({placement.decode for placement in first.values()}) == 2

    def test_without_its_worker_only_its_conversations_move(self):
        workers = self.pairs()
        gone = workers[0].party
        for session in self.SESSIONS:
            before, after = self.placed(workers, session), self.placed(workers[1:], session)
            assert before.prefill == gone or after.prefill == before.prefill

    def test_the_deepest_match_tells_more(self):
        for session in self.SESSIONS:
            workers = self.pairs()
            workers[2].prefix_match_tokens = 2000
            assert self.placed(workers, session).prefill == workers[2].party

    def test_a_queue_tells_more_than_a_guess(self):
        for session in self.SESSIONS:
            workers = self.pairs()
            own = self.placed(workers, session).prefill
            next(each for each in workers if each.party == own).queue_seconds = 0.1
            assert self.placed(workers, session).prefill != own
