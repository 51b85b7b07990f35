"""When to launch the next decode step while one runs. Pure: times come in as arguments.

Planned as soon as the step before it runs, a step leaves out whoever arrives before it begins, and a newcomer waits for
two steps of others. So it is planned as late as the host can have it on the device in time.
"""

from collections import deque

from splitserve.protocol.step import StepPlan

MARGIN_SECONDS = 0.0001
"""A device that waits for its next step costs all sequences, one step's wait for a newcomer costs one."""
FEWEST = 16
_REMEMBERED_STEPS = 32
_REMEMBERED_LAUNCHES = 128
_SELDOM = 0.05  # launches may take longer than expected as often as that


class LaunchPace:
    """Expects of a step that it takes no less time than those alike lately, and of a launch what nearly all have taken.
    Steps that compute prompts tell nothing of each other, and nothing is waited for while they run."""

    def __init__(self) -> None:
        self._step_seconds: dict[int, deque[float]] = {}
        self._launch_seconds: deque[float] = deque(maxlen=_REMEMBERED_LAUNCHES)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """What a step took on the device."""
        if _only_decodes(plan):
            self._like(plan).append(seconds)

    def note_launch(self, seconds: float) -> None:
        """From when a step could be planned until it was on the device, while another one ran there."""
        self._launch_seconds.append(seconds)

    def seconds_to_wait(self, plan: StepPlan) -> float:
        """From the beginning of a step until the one after it is to be planned; 0.0 for at once."""
        like = self._like(plan)
        if not _only_decodes(plan) or len(like) < FEWEST or len(self._launch_seconds) < FEWEST:
            return 0.0
        launches = sorted(self._launch_seconds)
        launch = launches[-1 - int(len(launches) * _SELDOM)]
        return max(0.0, min(like) - launch - MARGIN_SECONDS)

    def _like(self, plan: StepPlan) -> deque[float]:
        return self._step_seconds.setdefault(len(plan.chunks).bit_length(), deque(maxlen=_REMEMBERED_STEPS))


def _only_decodes(plan: StepPlan) -> bool:
    return plan.num_tokens == len(plan.chunks)
