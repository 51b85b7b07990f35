"""Residuals of a twin by component, and the name of the component that is off. Pure.

A component's seconds are means over requests: stages of their timelines, and the mean gap between tokens. Steps and
transfers are blamed before hosts, and all of these before queues, which grow wherever something behind them is slow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TPOT = "tpot"
"""The mean gap between tokens, beside the stages of timelines."""
COMPONENTS: Mapping[str, Sequence[str]] = {
    "prefill steps": ("prefill",),
    "decode steps": (TPOT,),
    "transfer": ("wire",),
    "hosts": ("prepare", "dispatch", "offer", "post", "verify", "delivery"),
    "queues": ("queue", "grant_wait", "prefill_queue", "decode_queue"),
}
"""Components, with the stages that they consist of; causes before their consequences."""
QUEUES = "queues"
TOLERANCE = 0.08
"""Relative residual up to which a component counts as right."""
MIN_SECONDS = 0.0005
"""Residual below which a component counts as right, however small it is."""
QUEUE_TOLERANCE = 0.3
"""The same as :data:`TOLERANCE` for queues: their lengths differ from one load to the next."""


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


def residuals_of(real: Mapping[str, float], twin: Mapping[str, float]) -> list[Residual]:
    """Return the residual of each component that either has; both map stages and :data:`TPOT` to mean seconds."""
    found = []
    for component, stages in COMPONENTS.items():
        if any(stage in real or stage in twin for stage in stages):
            sums = [sum(each.get(stage, 0.0) for stage in stages) for each in (real, twin)]
            found.append(Residual(component, *sums))
    return found


def verdict(residuals: Iterable[Residual]) -> str:
    """Return which component is off, in words. Queues are blamed only if nothing else is off."""
    off = [residual for residual in residuals if residual.is_off]
    causes = [residual for residual in off if residual.component != QUEUES]
    blamed = causes or off
    if not blamed:
        return "no component is off"
    worst = max(blamed, key=lambda residual: abs(residual.ratio - 1))
    others = [residual.component for residual in blamed if residual is not worst]
    also = f"; also off: {', '.join(others)}" if others else ""
    return f"off: {worst.words}{also}"
