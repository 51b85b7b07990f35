"""A runner whose steps the test lets go on, one by one, and the engine loop's part for its executor."""

import threading
import time

from splitserve.engine.steps.executor import Executor, StepResult
from splitserve.engine.steps.failures import StepFailure
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepOutput, StepPlan
from waiting import PATIENCE_SECONDS

GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def plan_of(token: int) -> StepPlan:
    return StepPlan([ScheduledChunk([token], 7, [0], GREEDY)])


class Step:
    """Ends when ``release`` is set: with the token that it got, or with ``error``."""

    def __init__(self, token: int, error: Exception | None) -> None:
        self.token = token
        self.error = error
        self.release = threading.Event()
        self.queued_at = time.monotonic()

    def wait(self) -> StepOutput:
        assert self.release.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        return StepOutput.of([self.token])


class GatedRunner:
    """Launches at once, but for tokens in ``launch_errors``; ``step_errors`` come out when the step is waited for."""

    def __init__(self) -> None:
        self.launch_errors: dict[int, Exception] = {}
        self.step_errors: dict[int, Exception] = {}
        self.launched: list[Step] = []
        self.is_open = False  # steps end at once
        self.changed = threading.Condition()

    def launch(self, plan: StepPlan) -> Step:
        (token,) = plan.chunks[0].token_ids
        with self.changed:
            step = Step(token, self.step_errors.get(token))
            self.launched.append(step)
            if self.is_open:
                step.release.set()
            self.changed.notify_all()
        if token in self.launch_errors:
            raise self.launch_errors[token]
        return step

    def run(self, plan: StepPlan) -> StepOutput:
        return self.launch(plan).wait()

    def open(self) -> None:
        """Let all steps end, later ones as well."""
        with self.changed:
            self.is_open = True
            for step in self.launched:
                step.release.set()

    def wait_launched(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.launched) >= number, PATIENCE_SECONDS)


class Driver:
    """The engine loop's part for an executor."""

    def __init__(self) -> None:
        self.runner = GatedRunner()
        self.woken = threading.Semaphore(0)
        self.device_works = True
        self.executor: Executor = OverlappedExecutor(self.runner, self.woken.release, self.check_device)

    def check_device(self) -> None:
        if not self.device_works:
            raise RuntimeError(ILLEGAL)

    def launch(self, *tokens: int) -> None:
        for token in tokens:
            assert self.executor.has_room
            self.executor.launch(plan_of(token))

    def release(self, number: int) -> None:
        self.runner.wait_launched(number)
        self.runner.launched[number - 1].release.set()

    def result(self) -> StepResult:
        assert self.woken.acquire(timeout=PATIENCE_SECONDS)
        result = self.executor.result()
        assert result is not None, "it woke the loop before the result was there"
        return result

    def close(self) -> None:
        self.runner.open()
        self.executor.close(PATIENCE_SECONDS)

    def failure(self) -> StepFailure:
        outcome = self.result().outcome
        assert isinstance(outcome, StepFailure)
        return outcome


class SetPace(LaunchPace):
    """Says what it is told to, and remembers what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.wait = 0.0
        self.launches: list[float] = []

    def note_launch(self, seconds: float) -> None:
        self.launches.append(seconds)

    def seconds_to_wait(self, plan: StepPlan) -> float:
        return self.wait
