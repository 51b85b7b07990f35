"""Residuals of a twin by component, and the name of the component that is off. Pure.

A component's seconds are means over requests. Steps, transfers and hosts are causes; queues are their consequences, and
gaps between tokens those of queues, since a batch is as large as its queue lets it be.

How many requests share a step depends on all components, so the time that requests spend in steps says little about the
steps. But their work hardly depends on it: a token's context is the same in any batch. So the twin's steps are compared
with the real ones by the workers' totals: the twin's time, with its time per step for as many steps and its time per
token for as many tokens as there really were.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import msgspec
import numpy as np

from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration, LinkModel

STEPS: Mapping[Role, str] = {
    Role.PREFILL: "prefill steps",
    Role.DECODE: "decode steps",
    Role.MIXED: "steps of mixed workers",
}
"""Components that are steps, by the role of the workers."""
TRANSFER, QUEUES, GAPS = "transfer", "queues", "gaps between tokens"
STAGES: Mapping[str, Sequence[str]] = {
    "hosts": ("prepare", "dispatch", "offer", "post", "verify", "delivery"),
    QUEUES: ("queue", "grant_wait", "prefill_queue", "decode_queue"),
}
"""Components that stages of requests' timelines add up to."""
CONSEQUENCES = (QUEUES, GAPS)
"""Components that are blamed only if none before them is off."""
TOLERANCE = 0.08
"""Relative residual up to which a component counts as right."""
MIN_SECONDS = 0.0005
"""Residual below which a component counts as right, however small it is."""
QUEUE_TOLERANCE = 0.3
"""The same as :data:`TOLERANCE` for queues: their lengths differ from one load to the next."""


Reads: TypeAlias = tuple[int, int, float]
"""Bytes of a hand-over that decode read, number of the reads, sum of their seconds."""


class StepTotals(msgspec.Struct, frozen=True):
    """Sums over the steps of all workers with a role."""

    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0  # of prompts and outputs

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(
            self.num_steps + other.num_steps, self.seconds + other.seconds, self.num_tokens + other.num_tokens
        )

    def __sub__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(
            self.num_steps - other.num_steps, self.seconds - other.seconds, self.num_tokens - other.num_tokens
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Figures of a load, real or simulated, that residuals are computed from."""

    num_requests: int
    stages: Mapping[str, float]  # mean seconds of each stage of requests' timelines
    gap_seconds: float  # between tokens, mean
    reads: Sequence[Reads]
    steps: Mapping[Role, StepTotals]


@dataclass(frozen=True, slots=True)
class Residual:
    """Seconds of a component in the real system and in its twin."""

    component: str
    real: float
    twin: float

    @property
    def seconds(self) -> float:
        return self.real - self.twin

    @property
    def ratio(self) -> float:
        """Return the real seconds over the twin's; infinite if the twin has none."""
        if self.twin:
            return self.real / self.twin
        return float("inf") if self.real else 1.0

    @property
    def is_off(self) -> bool:
        tolerance = QUEUE_TOLERANCE if self.component == QUEUES else TOLERANCE
        return abs(self.seconds) > MIN_SECONDS and abs(self.ratio - 1) > tolerance

    @property
    def words(self) -> str:
        """The residual in words."""
        times = "beyond any" if self.ratio == float("inf") else f"{self.ratio:.2f} times"
        return (
            f"{self.component}: {1e3 * self.real:.2f} ms in the real system, {times} the twin's {1e3 * self.twin:.2f} "
            "ms per request"
        )


def residuals_of(real: Observed, twin: Observed, calibration: Calibration) -> list[Residual]:
    """Return the residual of each component that either has; ``calibration``: the twin's."""
    found = [
        Residual(
            component,
            real.steps[role].seconds / real.num_requests,
            _rescaled(twin.steps[role], real.steps[role], calibration.step_model(role).base) / real.num_requests,
        )
        for role, component in STEPS.items()
        if role in real.steps and role in twin.steps
    ]
    if real.reads and twin.reads:
        found.append(_transfer(real.reads, twin.reads, calibration.link))
    for component, stages in STAGES.items():
        if any(stage in real.stages or stage in twin.stages for stage in stages):
            sums = [sum(each.stages.get(stage, 0.0) for stage in stages) for each in (real, twin)]
            found.append(Residual(component, *sums))
    return [*found, Residual(GAPS, real.gap_seconds, twin.gap_seconds)]


def _rescaled(twin: StepTotals, real: StepTotals, base: float) -> float:
    """Return the seconds that the twin's steps would have taken if they had been as many, with as many tokens, as in
    the real system."""
    work = twin.seconds - base * twin.num_steps
    return base * real.num_steps + work * real.num_tokens / max(1, twin.num_tokens)


def _transfer(real: Sequence[Reads], twin: Sequence[Reads], link: LinkModel) -> Residual:
    """Return the residual of the reads of a hand-over with the mean numbers of reads and bytes, at the rate that one in
    ten exceeds: others wait for each other."""
    num_bytes, num_reads = (fmean(each[index] for each in real) for index in (0, 1))
    seconds = []
    for reads in (real, twin):
        per_byte = [max(0.0, taken - link.read_seconds * count) / size for size, count, taken in reads]
        seconds.append(link.read_seconds * num_reads + num_bytes * float(np.percentile(per_byte, 10)))
    return Residual(TRANSFER, *seconds)


def verdict(residuals: Iterable[Residual]) -> str:
    """Return which component is off, in words: a cause, if one is, or the first consequence."""
    off = [residual for residual in residuals if residual.is_off]
    causes = [residual for residual in off if residual.component not in CONSEQUENCES]
    consequences = sorted(
        (each for each in off if each not in causes), key=lambda each: CONSEQUENCES.index(each.component)
    )
    blamed = causes or consequences[:1]
    if not blamed:
        return "no component is off"
    worst = max(blamed, key=lambda residual: abs(residual.ratio - 1))
    others = [residual.component for residual in blamed if residual is not worst]
    also = f"; also off: {', '.join(others)}" if others else ""
    return f"off: {worst.words}{also}"
