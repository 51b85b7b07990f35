"""The verdict of a comparison: goodput of each arm, differences with intervals, the region where disaggregation loses.

Pure: everything follows from the probes. Goodput is in requests per second of the whole arrangement; all arms have the
same number of devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splitserve.benchmarks.goodput.arms import LOAD_POLICY, PREFIX_POLICY, Arm
from splitserve.benchmarks.goodput.estimate import (
    Goodput,
    Interval,
    Probe,
    interval,
    is_order_known,
    measured_goodput,
    resampled_goodputs,
)
from splitserve.benchmarks.goodput.objectives import Objectives

SWEEP_FACTORS = tuple(float(factor) for factor in np.geomspace(0.25, 4.0, 17))
"""ITL objectives that a sweep looks at, in terms of the one that was given."""
SWEEP_RESAMPLES = 100


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Goodput of one arm. ``fills_gaps``: it computes prompts beside outputs, in the time that objectives leave."""

    name: str
    goodput: Goodput
    interval: Interval
    fills_gaps: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """``first`` against ``second``, the best arms of two kinds: the ratio of their goodputs, and the difference in
    requests per second.

    ``is_known``: whether the probes tell which kind's best is more, also where they only bound another arm of it.
    ``is_exact``: whether they bracket both. ``bound``: the ratio nearest to 1 that they leave, where it is known which
    is more.
    """

    first: str
    second: str
    ratio: float
    ratio_interval: Interval
    difference: float
    difference_interval: Interval
    is_known: bool
    is_exact: bool
    bound: float

    @property
    def is_clear(self) -> bool:
        """Return whether the interval of the difference excludes zero."""
        return self.difference_interval.low > 0 or self.difference_interval.high < 0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The best arms at one ITL objective; ``ratio``: goodput of the best split over that of the best mixed arm."""

    itl_ms: float
    best_mixed: str
    best_split: str
    mixed_goodput: float
    split_goodput: float
    mixed_kind: str  # of Goodput
    split_kind: str
    ratio: float
    ratio_interval: Interval
    is_known: bool  # whether the probes bracket both goodputs; otherwise the ratio is a bound at best


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole result; lists are empty and parts None where the arms for them are missing."""

    objectives: Objectives
    num_devices: int
    arms: tuple[ArmResult, ...]
    split_against_mixed: Difference | None
    effects: tuple[Difference, ...]  # routing and disaggregation apart
    sweep: tuple[SweepPoint, ...]


def judge(
    arms: Mapping[str, Arm | None], probes: Mapping[str, Sequence[Probe]], objectives: Objectives, seed: int
) -> Verdict:
    """Judge the probes of each arm; ``arms`` has None for endpoints, whose arrangement isn't known."""
    resampled = resampled_goodputs(probes, objectives, seed)
    filling = {name for name, arm in arms.items() if arm is not None and (arm.is_mixed or arm.is_conditional)}
    results = tuple(
        ArmResult(name, measured_goodput(found, objectives), interval(resampled[name]), name in filling)
        for name, found in probes.items()
    )
    goodputs = {result.name: result.goodput for result in results}
    mixed = [name for name in probes if (arm := arms[name]) is not None and arm.is_mixed]
    split = [name for name in probes if (arm := arms[name]) is not None and not arm.is_mixed]
    against = None
    if mixed and split:
        against = _difference(split, mixed, goodputs, resampled)
    numbers = [arm.num_workers for arm in arms.values() if arm is not None]
    return Verdict(
        objectives=objectives,
        num_devices=max(numbers, default=0),
        arms=results,
        split_against_mixed=against,
        effects=tuple(_effects(arms, goodputs, resampled)),
        sweep=tuple(_sweep(mixed, split, probes, objectives, seed)) if mixed and split else (),
    )


def sentence(verdict: Verdict) -> str:
    """Return the verdict in a sentence."""
    against = verdict.split_against_mixed
    if against is None:
        name = _best([arm.name for arm in verdict.arms], {arm.name: arm.goodput for arm in verdict.arms})
        best = next(arm for arm in verdict.arms if arm.name == name)
        return f"{best.name} holds {best.goodput.words} ({best.interval.words})."
    by_name = {arm.name: arm for arm in verdict.arms}
    first, second = by_name[against.first], by_name[against.second]
    return (
        f"On {verdict.num_devices} devices, the best disaggregated arm ({first.name}) holds {first.goodput.words}: "
        f"{_comparison(against)} the best mixed arm ({second.name}), which holds "
        f"{second.goodput.words}."
    )


def _comparison(against: Difference) -> str:
    """Return how the first goodput compares, in words. What the probes only bound is called a bound."""
    if not against.is_known:
        return "the probes don't tell whether that is more than"
    if not against.is_clear:
        return f"not clearly different from (ratio {against.ratio_interval.words})"
    percent = 100 * (against.bound - 1)
    words = f"{abs(percent):.0f}% {'more' if percent > 0 else 'less'} than"
    return words if against.is_exact else f"at least {words}"


def losing_region(verdict: Verdict) -> str:
    """Return where disaggregation loses, in a sentence; "" without a sweep."""
    if not verdict.sweep:
        return ""
    known = [point for point in verdict.sweep if point.is_known]
    if not known:
        return "The probes bracket the goodput of both kinds at no ITL objective, so none is known to be a loss."
    losing = [point.itl_ms for point in known if point.ratio < 1]
    if len(known) == 1:
        verb = "loses" if losing else "does not lose"
        return f"Disaggregation {verb} at {known[0].itl_ms:.3g} ms, the only ITL objective that the probes bracket."
    looked_at = f"the ITL objectives from {known[0].itl_ms:.3g} to {known[-1].itl_ms:.3g} ms that the probes bracket"
    if not losing:
        return f"Disaggregation loses at none of {looked_at}."
    if len(losing) == len(known):
        return f"Disaggregation loses at each of {looked_at}."
    listed = ", ".join(f"{value:.3g}" for value in losing)
    return f"Disaggregation loses at ITL objectives of {listed} ms, and at no other of {looked_at}."


def crossing(sweep: Sequence[SweepPoint], ratio: float) -> float | None:
    """Return the loosest ITL objective, in milliseconds, at which disaggregation reaches ``ratio``; None: none."""
    return max((point.itl_ms for point in sweep if point.is_known and point.ratio >= ratio), default=None)


def ranked(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the arms from the highest goodput down. Those that held no rate come last: theirs are upper bounds."""
    return sorted(arms, key=lambda arm: (arm.goodput.kind == "below", -arm.goodput.rate))


def _best(names: Sequence[str], goodputs: Mapping[str, Goodput]) -> str:
    """Return the arm with the highest goodput; of one that held no rate none is known."""
    return max(names, key=lambda name: (goodputs[name].kind != "below", goodputs[name].rate))


def _extent(names: Sequence[str], goodputs: Mapping[str, Goodput]) -> tuple[float, float]:
    """Return the least and the most that the best of ``names`` may hold: arms without a bracket may be the best."""
    lows, highs = zip(*(goodputs[name].extent for name in names), strict=True)
    return max(lows), max(highs)


def _difference(
    firsts: Sequence[str],
    seconds: Sequence[str],
    goodputs: Mapping[str, Goodput],
    resampled: Mapping[str, NDArray[np.float64]],
) -> Difference:
    """Return how the best of ``firsts`` compares with the best of ``seconds``."""
    first, second = _best(firsts, goodputs), _best(seconds, goodputs)
    ones, others = resampled[first], np.maximum(resampled[second], 1e-9)
    one, other = goodputs[first], goodputs[second]
    (low, high), (other_low, other_high) = extents = _extent(firsts, goodputs), _extent(seconds, goodputs)
    bound = 1.0
    if is_known := is_order_known(*extents):
        bound = low / max(other_high, 1e-9) if low > other_high else high / max(other_low, 1e-9)
    return Difference(
        first=first,
        second=second,
        ratio=one.rate / max(other.rate, 1e-9),
        ratio_interval=interval(ones / others),
        difference=one.rate - other.rate,
        difference_interval=interval(ones - others),
        is_known=is_known,
        is_exact=low == high and other_low == other_high,
        bound=bound,
    )


def _effects(
    arms: Mapping[str, Arm | None], goodputs: Mapping[str, Goodput], resampled: Mapping[str, NDArray[np.float64]]
) -> list[Difference]:
    """Return the effects of routing, with and without disaggregation, and of disaggregation, with either policy.

    For each corner the best arm with that policy counts.
    """

    def corner(*, mixed: bool, policy: str) -> list[str]:
        named = [(name, arm) for name, arm in arms.items() if name in goodputs and arm is not None]
        return [name for name, arm in named if arm.is_mixed == mixed and arm.policy == policy]

    policies = (LOAD_POLICY, PREFIX_POLICY)
    corners = {(mixed, policy): corner(mixed=mixed, policy=policy) for mixed in (True, False) for policy in policies}
    wanted = [
        ((True, PREFIX_POLICY), (True, LOAD_POLICY)),
        ((False, PREFIX_POLICY), (False, LOAD_POLICY)),
        ((False, LOAD_POLICY), (True, LOAD_POLICY)),
        ((False, PREFIX_POLICY), (True, PREFIX_POLICY)),
    ]
    found = []
    for one, other in wanted:
        if corners[one] and corners[other]:
            found.append(_difference(corners[one], corners[other], goodputs, resampled))
    return found


def _sweep(
    mixed: Sequence[str],
    split: Sequence[str],
    probes: Mapping[str, Sequence[Probe]],
    objectives: Objectives,
    seed: int,
) -> list[SweepPoint]:
    points = []
    for factor in SWEEP_FACTORS:
        changed = replace(objectives, itl_ms=objectives.itl_ms * factor)
        goodputs = {name: measured_goodput(probes[name], changed) for name in (*mixed, *split)}
        best_mixed, best_split = _best(mixed, goodputs), _best(split, goodputs)
        two = {name: probes[name] for name in (best_mixed, best_split)}
        resampled = resampled_goodputs(two, changed, seed, SWEEP_RESAMPLES)
        both = _difference(split, mixed, goodputs, resampled)
        points.append(
            SweepPoint(
                itl_ms=changed.itl_ms,
                best_mixed=best_mixed,
                best_split=best_split,
                mixed_goodput=goodputs[best_mixed].rate,
                split_goodput=goodputs[best_split].rate,
                mixed_kind=goodputs[best_mixed].kind,
                split_kind=goodputs[best_split].kind,
                ratio=both.ratio,
                ratio_interval=both.ratio_interval,
                is_known=both.is_exact,
            )
        )
    return points
