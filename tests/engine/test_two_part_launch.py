"""Forward passes that are quick to launch are launched by the engine loop, their draws by the thread that launches."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gated_runner import ILLEGAL, Driver, GatedRunner, Step
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.protocol.step import StepOutput, StepPlan
from waiting import PATIENCE_SECONDS


class TwoParts(GatedRunner):
    """Launches forward passes of tokens from 10 on by themselves; those of ``launch_errors`` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[tuple[str, int]] = []  # that ran each part, and a rehearsal
        self.may_draw = threading.Event()
        self.may_draw.set()
        self.rehearsal_error: Exception | None = None

    def launch_forward(self, plan: StepPlan) -> "Forward | None":
        (token,) = plan.chunks[0].token_ids
        if token < 10:
            return None
        self.threads.append(("forward", threading.get_ident()))
        if token in self.launch_errors:
            raise self.launch_errors[token]
        return Forward(self, plan)

    def launch(self, plan: StepPlan) -> Step:
        assert self.may_draw.wait(PATIENCE_SECONDS)
        self.threads.append(("draws", threading.get_ident()))
        return super().launch(plan)

    def rehearse(self) -> None:
        self.threads.append(("rehearsal", threading.get_ident()))
        if self.rehearsal_error is not None:
            raise self.rehearsal_error


@dataclass
class Forward:
    runner: TwoParts
    plan: StepPlan

    def launch_draws(self) -> Step:
        return self.runner.launch(self.plan)


class TestTwoParts:
    @pytest.fixture
    def runner(self) -> TwoParts:
        return TwoParts()

    @pytest.fixture
    def driver(self, runner: TwoParts) -> Iterator[Driver]:
        driver = Driver()
        driver.executor.close(10)
        driver.runner = runner
        driver.executor = OverlappedExecutor(runner, driver.woken.release)
        yield driver
        runner.may_draw.set()
        driver.close()

    def test_the_loop_launches_forward_passes_and_another_thread_draws(self, driver: Driver, runner: TwoParts) -> None:
        driver.launch(10)
        assert runner.threads[0] == ("forward", threading.get_ident())
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([10])
        ((part, thread),) = runner.threads[1:]
        assert part == "draws" and thread != threading.get_ident()

    def test_a_step_that_takes_longer_is_launched_by_the_other_thread(self, driver: Driver, runner: TwoParts) -> None:
        driver.launch(9)
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([9])
        assert [part for part, _ in runner.threads] == ["draws"]

    def test_forward_passes_stay_behind_the_draws_of_the_step_before(self, driver: Driver, runner: TwoParts) -> None:
        runner.may_draw.clear()
        driver.launch(10, 11)
        driver.executor.rehearse()
        assert [part for part, _ in runner.threads] == ["forward"], "the draws of the first step aren't launched"
        runner.may_draw.set()
        for number, token in enumerate((10, 11), start=1):
            driver.release(number)
            assert driver.result().outcome == StepOutput.of([token])
        assert [part for part, _ in runner.threads] == ["forward", "draws", "draws"]

    def test_a_forward_pass_that_fails_fails_its_step_alone(self, driver: Driver, runner: TwoParts) -> None:
        runner.launch_errors[10] = ValueError("no such block")
        driver.launch(10)
        failure = driver.failure()
        assert failure.step == 1 and str(failure.error) == "no such block"
        driver.launch(11)
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([11])

    def test_a_launch_is_rehearsed_once_and_its_errors_are_left_to_the_launch(
        self, driver: Driver, runner: TwoParts
    ) -> None:
        runner.rehearsal_error = RuntimeError(ILLEGAL)
        driver.executor.rehearse()
        driver.executor.rehearse()
        assert runner.threads == [("rehearsal", threading.get_ident())]
        driver.launch(10)
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([10])
        driver.executor.rehearse()
        assert [part for part, _ in runner.threads] == ["rehearsal", "forward", "draws", "rehearsal"]
