"""The time to launch the next step while one runs. Pure: times come in as arguments.

A step that is planned as soon as the step before it runs leaves out requests that arrive before it begins, and these
wait for two steps. So each step is planned just in time: as late as the host can still launch it without a gap.
"""

from collections import deque
from typing import NamedTuple

from splitserve.protocol.step import StepPlan

MARGIN_SECONDS = 0.0001
"""A device that waits for its next step costs all sequences, one step's wait for a newcomer costs one."""
FEWEST = 4
_REMEMBERED_STEPS = 32
_MOST_ALIKE = 8  # steps of the same number of sequences: later ones have longer contexts
_TOKENS_ALIKE = 64
_MOST_TOKENS = 640  # of prompts in a step: more than are computed beside outputs by default
_REMEMBERED_LAUNCHES = 128
_SELDOM = 0.02  # launches may come too late as often as that


class _Size(NamedTuple):
    """The size of a step. Those of the same size take about as long."""

    decodes: int  # bits of the number of sequences that decode
    prompts: int  # prompt tokens in units of _TOKENS_ALIKE, rounded up


class _Step(NamedTuple):
    num_decodes: int
    seconds: float


class LaunchPace:
    """The estimate of a step's duration, and of the time that a launch needs before the end of the step beside it.

    A step takes at least the time of the fastest recent step of its size, of those with as many sequences if there are
    enough. Launches begin so early that nearly all recent ones would have been in time, by those estimates. The
    durations of long prompts predict nothing, so a launch beside them isn't delayed.
    """

    def __init__(self) -> None:
        self._steps: dict[_Size, deque[_Step]] = {}
        self._needed: deque[float] = deque(maxlen=_REMEMBERED_LAUNCHES)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Note the time that a step took on the device."""
        num_decodes, size = _size(plan)
        if size is not None:
            self._steps.setdefault(size, deque(maxlen=_REMEMBERED_STEPS)).append(_Step(num_decodes, seconds))

    def note_launch(self, seconds: float) -> None:
        """Note how long before the expected end of a step the next one should have been planned, for its forward pass
        to be on the device at the true end. Its draws are queued while that pass runs."""
        self._needed.append(seconds)

    def expected_seconds(self, plan: StepPlan) -> float | None:
        """Return the time from the beginning of a step to its end, or None if it isn't known."""
        num_decodes, size = _size(plan)
        steps = () if size is None else self._steps.get(size, ())
        alike = [step.seconds for step in steps if step.num_decodes == num_decodes][-_MOST_ALIKE:]
        known = alike if len(alike) >= FEWEST else [step.seconds for step in steps]
        return min(known) if len(known) >= FEWEST else None

    @property
    def allowance(self) -> float | None:
        """The time before the expected end of a step at which the next one is to be planned, or None if it isn't
        known."""
        if len(self._needed) < FEWEST:
            return None
        needed = sorted(self._needed)
        return needed[-1 - int(len(needed) * _SELDOM)] + MARGIN_SECONDS


def _size(plan: StepPlan) -> tuple[int, _Size | None]:
    """Return a step's number of sequences that decode and its size, or None of one with a long prompt."""
    lengths = [len(chunk.token_ids) for chunk in plan.chunks]
    num_decodes = lengths.count(1)
    num_prompt_tokens = sum(lengths) - num_decodes
    if num_prompt_tokens > _MOST_TOKENS:
        return num_decodes, None
    return num_decodes, _Size(num_decodes.bit_length(), -(-num_prompt_tokens // _TOKENS_ALIKE))
