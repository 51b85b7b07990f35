"""Fits of step-time models to synthetic steps: coefficients come back, noise and stalls do little harm."""

import random

import numpy as np
import pytest

from splitserve.engine.steps.step_fit import MIN_FITTED_STEPS, MINUTE_SECONDS, StepFit, non_negative, work_of
from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

TRUE = StepModel(base=4e-3, per_decode=2e-5, per_context=3e-9, per_token=2.5e-5, per_pair=2e-10)
ESTIMATE = StepModel(base=2e-3, per_decode=5e-5, per_context=1e-8, per_token=1e-5, per_pair=1e-9)
DRAW = SampleSpec(0.0, 0, 1.0, 0, 0, 1)


def plan(decodes: list[int], prefills: list[tuple[int, int]]) -> StepPlan:
    """Return a plan of decodes at these positions, and of prefill chunks (start, tokens)."""
    chunks = [ScheduledChunk([1], start, [0], DRAW) for start in decodes]
    return StepPlan([*chunks, *(ScheduledChunk([1] * count, start, [0], None) for start, count in prefills)])


def random_plan(chosen: random.Random) -> StepPlan:
    decodes = [chosen.randrange(1, 4000) for _ in range(chosen.randrange(0, 64))]
    prefills = [(chosen.randrange(0, 4000), chosen.randrange(2, 512))] if chosen.random() < 0.3 or not decodes else []
    return plan(decodes, prefills)


def test_work_counts_decodes_and_prompts_apart() -> None:
    assert work_of(plan([9, 4], [(16, 4)])) == StepWork(2, 15, 4, 17 + 18 + 19 + 20)
    assert pairs(0, 3) == 6
    assert TRUE.prefill_seconds(0, 0, 512) == 0.0
    whole = TRUE.prefill_seconds(0, 1000, 512)
    assert whole == pytest.approx(2 * TRUE.base + 1000 * TRUE.per_token + pairs(0, 1000) * TRUE.per_pair)


def test_until_enough_steps_were_seen_the_estimate_counts() -> None:
    chosen, fit = random.Random(1), StepFit(ESTIMATE)
    for _ in range(MIN_FITTED_STEPS - 1):
        each = random_plan(chosen)
        fit.note(each, TRUE.seconds(work_of(each)), 0.0)
    assert fit.model == ESTIMATE


def test_a_few_prompts_tell_what_a_prompt_takes() -> None:
    """A prefill worker has one step for each; and two of them stall."""
    chosen, fit = random.Random(2), StepFit(ESTIMATE)
    prompts = plan([], [(0, 2048)])
    true = TRUE.seconds(work_of(prompts))
    assert ESTIMATE.seconds(work_of(prompts)) < 0.5 * true
    for number in range(60):
        fit.note(prompts, true * (30.0 if number in (3, 40) else chosen.gauss(1.0, 0.02)), 0.0)
        if number == MIN_FITTED_STEPS:
            assert fit.model.seconds(work_of(prompts)) == pytest.approx(true, rel=0.1)
    assert fit.model.seconds(work_of(prompts)) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0])
def test_an_estimate_that_is_far_off_is_forgotten_with_the_first_fit(factor: float) -> None:
    chosen = random.Random(3)
    fit = StepFit(StepModel.of([factor * coefficient for coefficient in TRUE.coefficients], 0))
    works: list[StepWork] = []
    for number in range(200):
        each = random_plan(chosen)
        works.append(work_of(each))
        fit.note(each, TRUE.seconds(works[-1]) * (30.0 if number == 5 else 1.0), 0.0)
    assert sum(map(fit.model.seconds, works)) == pytest.approx(sum(map(TRUE.seconds, works)), rel=0.15)


def fitted(seed: int, noise: float, stalls: float = 0.0) -> StepFit:
    chosen, fit = random.Random(seed), StepFit(ESTIMATE)
    for _ in range(2000):
        each = random_plan(chosen)
        seconds = TRUE.seconds(work_of(each)) * chosen.gauss(1.0, noise)
        fit.note(each, seconds * (50.0 if chosen.random() < stalls else 1.0), 0.0)
    return fit


@pytest.mark.parametrize("seed", range(3))
def test_coefficients_come_back(seed: int) -> None:
    fit = fitted(seed, 0.0)
    assert fit.model.num_steps == 2000
    assert fit.relative_error < 0.02
    chosen = random.Random(seed + 100)
    for _ in range(100):
        work = work_of(random_plan(chosen))
        assert fit.model.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)


def test_prompt_tokens_beside_outputs_have_a_cost_of_their_own() -> None:
    """The estimate's share is taken until steps of both kinds were seen; later steps of one kind leave it as it is."""
    true = StepModel(base=5e-3, per_decode=2e-5, per_context=3e-8, per_token=2e-5, per_pair=2e-10, saved_beside=5e-6)
    estimate = StepModel(
        base=4e-3, per_decode=2e-5, per_context=3e-8, per_token=3e-5, per_pair=2e-10, saved_beside=3e-6
    )
    chosen, fit = random.Random(9), StepFit(estimate)

    def run(number: int, decodes: list[int], prefills: list[tuple[int, int]]) -> None:
        for _ in range(number):
            each = plan(decodes, [(start, count + chosen.randrange(64)) for start, count in prefills])
            fit.note(each, true.seconds(work_of(each)), 0.0)

    run(200, [], [(0, 2048)])
    run(200, [900] * 30, [])
    assert 0.05 < fit.model.saved_beside / fit.model.per_token < 0.25
    run(400, [900] * 30, [(512, 300)])
    run(400, [900] * 30, [])
    assert fit.model.per_token_beside == pytest.approx(true.per_token_beside, rel=0.05)
    run(2000, [], [(0, 2048)])
    assert fit.model.per_token_beside == pytest.approx(true.per_token_beside, rel=0.05)
    prompt = work_of(plan([], [(0, 2048)]))
    assert fit.model.seconds(prompt) == pytest.approx(true.seconds(prompt), rel=0.03)


def test_noise_and_stalls_do_little_harm() -> None:
    fit = fitted(3, 0.1, stalls=0.005)
    chosen = random.Random(7)
    for _ in range(100):
        work = work_of(random_plan(chosen))
        assert fit.model.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.1)
    assert 0.04 < fit.relative_error < 0.3


@pytest.mark.parametrize(("scatter", "num_steps", "tolerance"), [(0.2, 8000, 0.02), (0.3, 8000, 0.02), (0.6, 400, 0.1)])
def test_times_that_scatter_are_predicted_by_their_mean(scatter: float, num_steps: int, tolerance: float) -> None:
    """A fit relative to the steps' own times would be 8, 16 or 50% below the mean of such lognormal times."""
    chosen, fit = random.Random(8), StepFit(ESTIMATE)
    works: list[StepWork] = []
    for _ in range(num_steps):
        each = random_plan(chosen)
        works.append(work_of(each))
        fit.note(each, TRUE.seconds(works[-1]) * chosen.lognormvariate(-scatter * scatter / 2, scatter), 0.0)
    found, true = (sum(map(model.seconds, works)) for model in (fit.model, TRUE))
    assert found == pytest.approx(true, rel=tolerance)


def test_decoding_alone_leaves_the_knowledge_of_prompts() -> None:
    chosen, fit = random.Random(5), StepFit(ESTIMATE)
    for number in range(20_000):
        each = random_plan(chosen) if number < 1000 else plan([chosen.randrange(1, 4000) for _ in range(8)], [])
        fit.note(each, TRUE.seconds(work_of(each)), 0.0)
    prompt = work_of(plan([], [(0, 512)]))
    assert fit.model.seconds(prompt) == pytest.approx(TRUE.seconds(prompt), rel=0.1)


def as_measured(num_decodes: int) -> float:
    """Return the seconds of a step that only decodes, about as on an H100: 5.6 ms for one sequence, 11.7 for 57."""
    return 4.9e-3 + 6.5e-4 * num_decodes**0.58


def test_a_load_that_comes_after_one_sequence_is_predicted_where_it_is() -> None:
    """Steps take longer the more sequences decode, but less and less so."""
    chosen, fit = random.Random(9), StepFit(ESTIMATE)
    for number in range(2200):
        num_decodes = 1 if number < 1500 else 1 + min(56, (number - 1500) // 10)
        fit.note(plan([2300] * num_decodes, []), as_measured(num_decodes) * chosen.gauss(1.0, 0.02), 0.0)
        if number >= 1700 and number % 100 == 99:
            work = work_of(plan([2300] * num_decodes, []))
            assert fit.model.seconds(work) == pytest.approx(as_measured(num_decodes), rel=0.05)


def test_prompts_between_decode_steps_leave_the_model_where_the_load_is() -> None:
    """Each refit comes after a step without outputs, or with a few: the fifty sequences of the other steps count."""

    chosen, fit = random.Random(10), StepFit(ESTIMATE)
    for number in range(1, 2001):
        if number % 10 == 0:
            fit.note(plan([], [(0, 512)]), 2e-2 * chosen.gauss(1.0, 0.02), 0.0)
        else:
            num_decodes = 1 if number < 1000 else 57
            fit.note(plan([2300] * num_decodes, []), as_measured(num_decodes) * chosen.gauss(1.0, 0.02), 0.0)
        if number >= 1200 and number % 50 == 0:
            assert fit.model.seconds(work_of(plan([2300] * 57, []))) == pytest.approx(as_measured(57), rel=0.02)


def test_no_coefficient_is_negative_and_what_was_not_seen_stays_an_estimate() -> None:
    chosen, fit = random.Random(6), StepFit(ESTIMATE)
    for _ in range(1000):
        fit.note(plan([100] * chosen.randrange(1, 9), []), 5e-3 * chosen.gauss(1.0, 0.2), 0.0)
    assert min(fit.model.coefficients) >= 0.0
    assert fit.model.per_token == pytest.approx(ESTIMATE.per_token, rel=0.05)


def test_a_wild_model_is_held_near_its_reference() -> None:
    liar = StepModel(base=0.0, per_decode=1.0, per_context=3e-9, per_token=2.5e-5, per_pair=2e-10, num_steps=9)
    held = liar.clamped(TRUE, 4.0)
    assert held.base == TRUE.base / 4 and held.per_decode == TRUE.per_decode * 4
    assert held.coefficients[2:] == TRUE.coefficients[2:] and held.num_steps == 9


def test_the_next_minute_is_predicted_by_the_model_before_it() -> None:
    """Steps that take a quarter longer from some minute on are 20% off in it, and right again in a later one."""
    chosen, fit = random.Random(4), StepFit(ESTIMATE)
    now, errors = 100.0, []
    for minute in range(12):
        for _ in range(600):
            each = random_plan(chosen)
            now += MINUTE_SECONDS / 600
            fit.note(each, TRUE.seconds(work_of(each)) * (1.25 if minute >= 5 else 1.0), now)
        errors.append(fit.minute_error)
    assert errors[0] == 0.0, "no fit was there at its begin"
    assert max(errors[2:5]) < 0.02
    assert max(errors[5:7]) == pytest.approx(0.2, abs=0.02)
    assert errors[-1] < 0.1


def test_a_pause_is_not_a_minute() -> None:
    chosen, fit = random.Random(5), StepFit(ESTIMATE)
    for number in range(1000):
        each = random_plan(chosen)
        fit.note(each, TRUE.seconds(work_of(each)), 1000.0 * number)
    assert fit.minute_error == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_the_fit_is_the_minimum_however_alike_the_unknowns_are(seed: int) -> None:
    chosen = np.random.default_rng(seed)
    rows = chosen.normal(size=(60, 7))
    for column in (1, 2):
        rows[:, column] = rows[:, 0] + 10.0 ** chosen.uniform(-4, 0) * rows[:, column]
    products = rows.T @ rows + 1e-6 * np.eye(7)
    targets = rows.T @ (rows @ np.maximum(chosen.normal(size=7), 0.0) + 0.1 * chosen.normal(size=60))
    found = non_negative(products, targets)
    slope = products @ found - targets  # 0 for what is above 0, and not negative for the rest
    tolerance = 1e-8 * float(np.abs(targets).max())
    assert found.min() >= 0.0 and slope.min() >= -tolerance
    assert np.abs(slope[found > 0.0]).max(initial=0.0) <= tolerance
