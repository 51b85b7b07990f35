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
_SELDOM = 0.03  # launches may take longer than expected as often as that


class _Size(NamedTuple):
    """The size of a step. Those of the same size take about as long."""

    decodes: int  # bits of the number of sequences that decode
    prompts: int  # prompt tokens in units of _TOKENS_ALIKE, rounded up


class _Step(NamedTuple):
    num_decodes: int
    seconds: float


def _size(plan: StepPlan) -> tuple[int, _Size | None]:
    """Return a step's number of sequences that decode and its size, or None of one with a long prompt. Any chunk of one
    token counts as one that decodes: it takes as long, and telling them apart would triple the time of this."""
    lengths = [len(chunk.token_ids) for chunk in plan.chunks]
    num_decodes = lengths.count(1)
    num_prompt_tokens = sum(lengths) - num_decodes
    if num_prompt_tokens > _MOST_TOKENS:
        return num_decodes, None
    return num_decodes, _Size(num_decodes.bit_length(), -(-num_prompt_tokens // _TOKENS_ALIKE))


class LaunchPace:
    """The estimate of a step's and a launch's duration. A step takes at least the time of the fastest recent step of
    its size, of those with as many sequences if there are enough, a launch at most the time of nearly all recent ones.
    The durations of long prompts predict nothing, so a launch beside them isn't delayed."""

    def __init__(self) -> None:
        self._steps: dict[_Size, deque[_Step]] = {}
        self._launch_seconds: deque[float] = deque(maxlen=_REMEMBERED_LAUNCHES)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Note the time that a step took on the device."""
        num_decodes, size = _size(plan)
        if size is not None:
            self._steps.setdefault(size, deque(maxlen=_REMEMBERED_STEPS)).append(_Step(num_decodes, seconds))

    def note_launch(self, seconds: float) -> None:
        """Note the time from when a step could be planned until its forward pass was on the device, while another step
        ran there. Its draws are queued while that pass runs."""
        self._launch_seconds.append(seconds)

    def seconds_to_wait(self, plan: StepPlan) -> float:
        """Return the time from the beginning of a step until the next one is to be planned; 0.0 for at once."""
        expected = self._least_seconds(plan)
        if expected is None or len(self._launch_seconds) < FEWEST:
            return 0.0
        launches = sorted(self._launch_seconds)
        launch = launches[-1 - int(len(launches) * _SELDOM)]
        return max(0.0, expected - launch - MARGIN_SECONDS)

    def _least_seconds(self, plan: StepPlan) -> float | None:
        """Return the time that a step takes at least, or None if it isn't known."""
        num_decodes, size = _size(plan)
        steps = () if size is None else self._steps.get(size, ())
        alike = [step.seconds for step in steps if step.num_decodes == num_decodes][-_MOST_ALIKE:]
        known = alike if len(alike) >= FEWEST else [step.seconds for step in steps]
        return min(known) if len(known) >= FEWEST else None
