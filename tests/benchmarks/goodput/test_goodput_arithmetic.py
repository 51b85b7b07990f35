"""Goodput's arithmetic on numbers worked out by hand: pressure, crossing, intervals, search, verdict."""

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.goodput.arms import Arm, check_equal_devices, default_arms, parse_arm
from splitserve.benchmarks.goodput.charts import Charts
from splitserve.benchmarks.goodput.comparison import PROPOSED_STEP, Comparison
from splitserve.benchmarks.goodput.estimate import Probe, block_indices, goodput_of, interval, resampled_goodputs
from splitserve.benchmarks.goodput.objectives import MAX_PRESSURE, Objectives, Outcome, percentile
from splitserve.benchmarks.goodput.probe import ProbeResult, Setup, held_of, result_of
from splitserve.benchmarks.goodput.report import _arms_table, notes
from splitserve.benchmarks.goodput.search import Search, Sweep
from splitserve.benchmarks.goodput.verdict import crossing, judge, losing_region, ranked, sentence
from splitserve.benchmarks.serving.conversations import NOT_SENT, TurnRecord, with_unsent
from splitserve.common.errors import ConfigError
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.placement.modes.serving_mode import Held
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload
from splitserve.workloads.named import parse_workload

OBJECTIVES = Objectives(ttft_ms=100.0, itl_ms=20.0, percentile=90.0)


def outcome(ttft_ms: float, itl_ms: float, number: int = 100, spread: float = 0.0, seed: int = 0) -> Outcome:
    random = np.random.default_rng(seed)
    ttft = ttft_ms * np.exp(spread * random.standard_normal(number))
    return Outcome(ttft, tuple(np.full(5, itl_ms) for _ in range(number)), 0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 10.0, 9.0, 8.0, 7.0, 6.0])
    assert [percentile(values, share) for share in (10, 50, 90, 99)] == [1.0, 5.0, 9.0, 10.0]
    assert percentile(np.array([1.0] * 9 + [math.inf]), 90) == 1.0  # one failure in ten is what p90 allows
    assert percentile(np.array([1.0] * 8 + [math.inf] * 2), 90) == math.inf
    assert percentile(np.empty(0), 90) == 0.0


def test_pressure_is_the_larger_ratio() -> None:
    assert outcome(50.0, 10.0).pressure(OBJECTIVES) == 0.5
    assert outcome(50.0, 30.0).pressure(OBJECTIVES) == 1.5
    assert outcome(170.0, 30.0).pressure(OBJECTIVES) == 1.7


def test_the_pressure_of_chosen_requests_is_that_of_a_load_of_them() -> None:
    random = np.random.default_rng(0)
    gaps = tuple(random.uniform(5, 60, number) for number in (0, 3, 1, 7, 2))
    whole = Outcome(np.array([20.0, 150.0, 30.0, math.inf, 50.0]), gaps, 0)
    chosen = np.array([[0, 1, 2, 3, 4], [4, 4, 4, 1, 2], [0, 0, 0, 0, 0], [2, 4, 2, 4, 0], [3, 3, 1, 0, 3]])
    expected = [Outcome(whole.ttft_ms[row], tuple(gaps[index] for index in row), 0) for row in chosen]
    for share in (50.0, 99.0):
        objectives = Objectives(100.0, 20.0, share)
        assert whole.pressures(chosen, objectives).tolist() == [each.pressure(objectives) for each in expected]


def test_failures_are_misses_and_lack_their_tokens() -> None:
    good = RequestRecord(0.0, sent_seconds=0.0, end_seconds=0.1, chunk_seconds=[0.01, 0.02, 0.04])
    cut = RequestRecord(1.0, sent_seconds=1.0, end_seconds=1.1, chunk_seconds=[1.01, 1.02], error="lost")
    found = Outcome.of([good, cut], [3, 5])
    assert found.ttft_ms.tolist() == [pytest.approx(10.0), math.inf] and found.num_failed == 1
    assert [len(gaps) for gaps in found.gaps_ms] == [2, 4] and np.isinf(found.gaps_ms[1]).sum() == 3
    assert found.pressure(OBJECTIVES) == MAX_PRESSURE


def test_the_crossing_is_interpolated_in_the_logarithm() -> None:
    assert goodput_of([(1.0, 0.1), (2.0, 0.5), (4.0, 2.0)]).rate == pytest.approx(3.0)
    assert goodput_of([(4.0, 2.0), (2.0, 0.25), (2.0, 1.0)]).rate == pytest.approx(3.0)  # 0.25 and 1 average to 0.5
    crossed = goodput_of([(1.0, 0.9), (2.0, 1.2), (3.0, 0.8)])  # the first failure counts
    assert crossed.kind == "crossed" and 1.0 < crossed.rate < 2.0
    assert (goodput_of([(1.0, 0.5)]).kind, goodput_of([(1.0, 1.5)]).kind) == ("at least", "below")


def test_a_pressure_without_a_size_leaves_the_whole_bracket_open() -> None:
    refused = Outcome(np.full(100, math.inf), tuple(np.full(5, 1.0) for _ in range(100)), 100)
    probes = [Probe(10.0, outcome(95.0, 1.0)), Probe(14.0, refused)]
    assert goodput_of([(probe.rate, probe.outcome.pressure(OBJECTIVES)) for probe in probes]).rate == 12.0
    found = interval(resampled_goodputs({"arm": probes}, OBJECTIVES, 0)["arm"])
    assert 10.0 < found.low < 10.5 and 13.5 < found.high < 14.0


def test_blocks_are_of_consecutive_requests() -> None:
    found, other = block_indices(100, 2, np.random.default_rng(0))
    assert found.tolist() != other.tolist() and len(found) == 100 and set(found) <= set(range(100))
    steps = np.diff(found) % 100
    assert (steps == 1).sum() >= 85  # ten blocks of ten


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The pressure's logarithm grows with the rate, and is 0 at 4 requests/s; TTFT varies by 30%."""
    objectives = Objectives(100.0, 1e6, 50.0)  # of the median: exact even for few requests
    held = 0
    for seed in range(40):
        ttft = {rate: 100.0 * math.exp(0.25 * (rate - 4.0)) for rate in (3.0, 5.0)}
        probes = [Probe(r, outcome(ttft[r], 1.0, 200, 0.3, 100 * seed + int(r))) for r in ttft]
        found = interval(resampled_goodputs({"a": probes}, objectives, seed, 100)["a"])
        held += found.low <= 4.0 <= found.high
    assert 31 <= held <= 40  # 36 are expected


def test_a_search_brackets_the_crossing_from_either_side() -> None:
    for first in (0.1, 3.0, 200.0):
        search, steps = Search(first, precision=0.1, num_repeats=2, max_probes=30), count()
        while (rate := search.next_rate()) is not None and next(steps) < 40:
            search.note(rate, (rate / 7.3) ** 2)
        low, high = search.bracket()
        assert low is not None and high is not None and low <= 7.3 <= high <= 1.1 * low
        assert len(search.pressures[low]) == len(search.pressures[high]) == 2


@pytest.mark.parametrize("share", [0.85, 0.95, 1.0, 1.1, 1.19])
def test_three_probes_bracket_a_goodput_that_was_proposed_within_a_fifth(share: float) -> None:
    search = Search(7.3 * share, precision=0.15, num_repeats=1, max_probes=3, min_step=PROPOSED_STEP)
    while (rate := search.next_rate()) is not None:
        search.note(rate, (rate / 7.3) ** 2)
    low, high = search.bracket()
    assert low is not None and high is not None and low <= 7.3 <= high <= 1.2 * low


def test_a_search_ends_with_its_probes() -> None:
    search = Search(1.0, max_probes=5)
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.note(rate, 0.01)
    assert rates == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_given_step_is_kept_however_far_the_pressure_is() -> None:
    search = Search(9.0, precision=0.2, num_repeats=1, step=1.15)
    search.note(9.0, 1.97)  # by the pressure the next one would be 4.57
    assert search.next_rate() == 7.83
    search.note(7.83, 0.92)
    assert search.next_rate() is None


def test_arms_are_read_as_they_are_written() -> None:
    for arm in default_arms(3, [128, 512]):
        assert parse_arm(arm.name) == arm
    assert parse_arm("2P1D:cost").is_conditional and parse_arm("2M@64").chunk_tokens == 64
    for text in ("P1D", "0P1D", "2P0D", "0M", "1P1D:fastest", "2M@x", "mixed"):
        with pytest.raises(ConfigError, match="arm"):
            parse_arm(text)
    with pytest.raises(ConfigError, match="same number of devices"):
        check_equal_devices([Arm(1, 1), Arm(num_mixed=3)])


def judged(mixed_itl: float, split_itl: float):
    """Judge arms whose ITL grows with the rate, from the given one at 1 request/s."""
    arms = {"2M:least-loaded": parse_arm("2M"), "1P1D:least-loaded": parse_arm("1P1D")}
    probes = {
        name: [Probe(rate, outcome(1.0, itl * rate)) for rate in (1.0, 2.0, 4.0, 8.0, 16.0)]
        for name, itl in zip(arms, (mixed_itl, split_itl), strict=True)
    }
    return judge(arms, probes, OBJECTIVES, seed=0)


def test_the_verdict_names_the_better_arm_and_by_how_much() -> None:
    verdict = judged(mixed_itl=10.0, split_itl=5.0)  # 20 ms are reached at 2 and at 4 requests/s
    assert verdict.split_against_mixed is not None
    assert verdict.split_against_mixed.ratio == pytest.approx(2.0) and verdict.split_against_mixed.is_clear
    assert "1P1D:least-loaded) holds 4 requests/s: 100% more than" in sentence(verdict)
    assert "50% less than" in sentence(judged(5.0, 10.0))
    assert "not clearly different" in sentence(judged(10.0, 10.0))


def test_what_the_probes_only_bound_is_called_a_bound() -> None:
    assert "holds at least 16 requests/s: at least 700% more than" in sentence(judged(10.0, 1.0))
    assert "holds 4 requests/s: at least 300% more than" in sentence(judged(50.0, 5.0))  # less than 1 request/s


def test_an_arm_that_held_no_rate_is_not_the_better_one() -> None:
    """It was probed at higher rates than the other arm, and failed at all of them."""
    arms = {name: parse_arm(name) for name in ("2M:least-loaded", "1P1D:least-loaded", "1P1D:cost")}
    rates = {"2M:least-loaded": (1.0, 2.0, 4.0), "1P1D:least-loaded": (1.0, 1.5), "1P1D:cost": (50.0, 100.0)}
    probes = {name: [Probe(rate, outcome(1.0, 10.0 * rate)) for rate in found] for name, found in rates.items()}
    verdict = judge(arms, probes, OBJECTIVES, seed=0)
    assert verdict.split_against_mixed is not None and verdict.split_against_mixed.first == "1P1D:least-loaded"
    del arms["1P1D:least-loaded"], probes["1P1D:least-loaded"]
    verdict = judge(arms, probes, OBJECTIVES, seed=0)
    assert verdict.split_against_mixed is not None and not verdict.split_against_mixed.is_known
    assert "holds less than 50 requests/s: the probes don't tell whether that is more than" in sentence(verdict)


@pytest.mark.parametrize(
    ("other", "rates", "words"),
    [
        ("2M@64", (2.0,), "the probes don't tell whether"),  # as a run that --max-seconds ended leaves it
        ("2M@64", (9.0,), "the probes don't tell whether"),  # less than 9
        ("2M@64", (4.0,), "the probes don't tell whether"),  # less than 4, and 1P1D holds 3.9
        ("2M@64", (3.5,), "at least 11% more than"),  # less than 3.5
        ("2M@64", (2.0, 3.0, 4.0), "30% more than"),
        ("1P1D:cost", (2.0,), "at least 30% more than"),
        ("1P1D:cost", (9.0,), "at least 30% more than"),
        ("1P1D:cost", (2.0, 3.0, 4.0), "30% more than"),
    ],
)
def test_another_arm_that_is_only_bounded_may_be_the_best(other: str, rates: tuple[float, ...], words: str) -> None:
    """2M holds 3 requests/s, and so would ``other``; 1P1D holds 3.9."""
    arms = {name: parse_arm(name) for name in ("2M", "1P1D", other)}
    probes = {
        "2M": [Probe(rate, outcome(1.0, 20.0 * rate / 3.0)) for rate in (2.0, 3.0, 4.0)],
        "1P1D": [Probe(rate, outcome(1.0, 20.0 * rate / 3.9)) for rate in (2.0, 3.9, 4.0)],
        other: [Probe(rate, outcome(1.0, 20.0 * rate / 3.0)) for rate in rates],
    }
    verdict = judge(arms, probes, OBJECTIVES, seed=0)
    assert f": {words} " in sentence(verdict)
    [point] = [point for point in verdict.sweep if point.itl_ms == pytest.approx(OBJECTIVES.itl_ms)]
    assert point.is_known == (words == "30% more than")


def test_the_losing_region_follows_from_the_same_probes() -> None:
    verdict = judged(mixed_itl=10.0, split_itl=5.0)
    known = [point for point in verdict.sweep if point.is_known]
    assert known and crossing(verdict.sweep, 1.3) == known[-1].itl_ms
    assert losing_region(verdict).startswith("Disaggregation loses at none")
    assert losing_region(judged(5.0, 10.0)).startswith("Disaggregation loses at each")
    only = replace(verdict, sweep=[known[0]])
    assert losing_region(only).startswith(f"Disaggregation does not lose at {known[0].itl_ms:.3g} ms, the only")
    assert not all(point.is_known for point in verdict.sweep)  # 80 ms: mixed workers never reach it


def test_a_chart_shows_what_is_known_of_goodput_alone() -> None:
    """No point where no probe held, and hollow ones where all did."""
    arms = {"2M:least-loaded": parse_arm("2M"), "1P1D:least-loaded": parse_arm("1P1D")}
    found = [Probe(rate, outcome(1.0, 10.0 * rate)) for rate in (1.0, 2.0, 4.0)]
    verdict = judge(arms, dict.fromkeys(arms, found), OBJECTIVES, seed=0)
    kinds = {kind: [p for p in verdict.sweep if p.split_kind == kind] for kind in ("below", "crossed", "at least")}
    assert all(kinds.values()), "the objectives span a factor of 16"
    [figure] = [Charts(verdict, [], [])._figures["goodput by ITL objective"]]
    points, hollow = figure.axes[0].lines[:2]
    assert list(points.get_xdata()) == [point.itl_ms for kind in ("crossed", "at least") for point in kinds[kind]]
    assert list(hollow.get_xdata()) == [point.itl_ms for point in kinds["at least"]]
    assert hollow.get_markerfacecolor() == "white"


def probe_result(arm: str, rate: float, seed: int) -> ProbeResult:
    pressure = rate / (3.0 if arm.startswith("1P") else 2.0)
    gaps = [[20.0 * pressure] * 3 for _ in range(20)]
    return ProbeResult(
        arm=arm, rate=rate, seed=seed, offered_rate=rate, seconds=1.0, ttft_ms=[1.0] * 20, gaps_ms=gaps, figures={}
    )


def test_a_sweep_probes_the_same_rates_whatever_is_found() -> None:
    sweep, probed = Sweep([2.0, 4.0, 8.0], num_repeats=2), []
    assert (sweep.first_rate, sweep.max_probes) == (2.0, 6)
    while (rate := sweep.next_rate()) is not None:
        probed.append(rate)
        sweep.note(rate, 9.0 if rate > 3 else 0.1)
    assert probed == [2.0, 4.0, 8.0] * 2 and sweep.num_probes == 6


def test_a_probe_has_as_many_requests_as_it_takes_to_last() -> None:
    setup = Setup(parse_workload("64/8", 0), OBJECTIVES, num_requests=300, vocab_size=256, min_seconds=10.0)
    assert [setup.num_requests_at(rate) for rate in (1.0, 30.0, 30.01, 100.0)] == [300, 300, 301, 1000]


def test_arms_take_turns_and_a_run_resumes() -> None:
    arms = {"2M": parse_arm("2M"), "1P1D": parse_arm("1P1D")}

    def comparison() -> Comparison:
        return Comparison(arms, OBJECTIVES, {name: Search(1.0, 0.3, 2, 8) for name in arms}, seed=5)

    whole = comparison()
    order = [result.arm for result in whole.run(lambda name, _arm, rate, seed: probe_result(name, rate, seed))]
    assert order[:4] == ["2M", "1P1D"] * 2
    interrupted = comparison()
    running = interrupted.run(lambda name, _arm, rate, seed: probe_result(name, rate, seed))
    kept = [next(running) for _ in range(5)]
    resumed = comparison()
    resumed.resume(kept)
    rest = list(resumed.run(lambda name, _arm, rate, seed: probe_result(name, rate, seed)))
    assert [(p.arm, p.rate, p.seed) for p in kept + rest] == [(p.arm, p.rate, p.seed) for p in whole.probes]
    assert {probe.seed for probe in whole.probes} == {5, 6}  # a second probe at a rate has other requests


def test_the_rates_that_a_router_predicts_are_read_from_its_metrics() -> None:
    metrics = RouterMetrics()
    metrics.watch_mode(lambda: False, lambda: None)
    assert held_of(metrics.render().decode()) == {}
    metrics.watch_mode(lambda: True, lambda: Held(disaggregated=14.5, aggregated=16.25))
    assert held_of(metrics.render().decode()) == {"disaggregated": 14.5, "aggregated": 16.25}


def test_an_arm_that_held_no_rate_is_ranked_last() -> None:
    """The rate that it is known to be below may be higher than what others hold."""
    arms = ("2M", "1P1D", "1P1D:cost")
    loads = dict(zip(arms, [((9.0, 3.0),), ((2.0, 0.5), (4.0, 2.0)), ((5.0, 0.5),)], strict=True))
    probes = {name: [Probe(rate, outcome(100 * to, 9.0)) for rate, to in found] for name, found in loads.items()}
    verdict = judge({name: parse_arm(name) for name in arms}, probes, OBJECTIVES, seed=0)
    assert [arm.name for arm in ranked(verdict.arms)] == ["1P1D:cost", "1P1D", "2M"]
    rows = _arms_table(verdict, dict.fromkeys(arms)).split("<tr>")[2:]
    assert "less than 9" in rows[2] and "width:0.0%" in rows[2]
    assert "at least 5" in rows[0] and "width:100.0%" in rows[0]


def test_short_answers_and_short_loads_are_noted() -> None:
    """An endpoint that ends answers early has a lighter load than the others; a short load shows no growing queue."""
    workload = parse_workload("9/3").at(1.0, 2, 0)
    turns = [
        TurnRecord(str(number), 0, 9, 3, RequestRecord(number, number, number + 0.1, times, output_tokens=len(times)))
        for number, times in enumerate([[0.01, 0.02, 0.03], [1.01, 1.02]])
    ]
    probe = result_of("2M:least-loaded", 3.0, 0, workload, turns)
    verdict = judge({probe.arm: parse_arm(probe.arm)}, {probe.arm: [Probe(3.0, probe.outcome)]}, OBJECTIVES, seed=0)
    assert any("1 of 2 answers were shorter than asked" in note for note in notes([probe], verdict))
    words = "the load took 1.1 s, less than 20 times the TTFT objective"  # of 100 ms
    assert any(words in note and "--min-seconds 2" in note for note in notes([probe], verdict))
    for seconds, rate in ((2.0, 3.0), (1.1, 1.0)):  # 2 requests at 1/s take 2 s on average, if not here
        probe.seconds, probe.rate = seconds, rate
        assert not any(words[:13] in note for note in notes([probe], verdict))


def test_turns_that_a_failed_one_cuts_off_count_as_failed() -> None:
    """Otherwise an arm that drops conversations would be judged by a lighter load."""
    turns = (Turn((Piece("p", 9),), 2),) * 4
    workload = Workload("two", (Conversation("whole", 0.0, turns), Conversation("cut", 0.5, turns)))
    records = [
        TurnRecord("whole", number, 9, 2, RequestRecord(number, number, number + 0.2, [number + 0.1, number + 0.2]))
        for number in range(4)
    ]
    records.insert(1, TurnRecord("cut", 0, 9, 2, RequestRecord(0.5, 0.5, 0.75, error="HTTP 503")))
    everything = with_unsent(workload, records)
    assert [(each.conversation, each.number) for each in everything] == [
        ("whole", 0), ("cut", 0), ("cut", 1), ("cut", 2), ("cut", 3), ("whole", 1), ("whole", 2), ("whole", 3)
    ]  # fmt: skip
    probe = result_of("2M:least-loaded", 1.0, 0, workload, records)
    assert (len(probe.ttft_ms), probe.outcome.num_failed) == (8, 4)
    assert probe.figures["failed"] == {"HTTP 503": 1, NOT_SENT: 3}
    assert [gaps for gaps in probe.gaps_ms if None in gaps] == [[None]] * 4
    assert with_unsent(workload, records[:1]) == records[:1], "the second turn may come yet"
