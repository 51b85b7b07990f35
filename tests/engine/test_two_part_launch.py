"""Forward passes that are quick to launch are launched by the engine loop, their draws by the thread that launches."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gated_runner import ILLEGAL, Driver, GatedRunner, SetPace, Step
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.protocol.step import StepOutput, StepPlan
from waiting import PATIENCE_SECONDS, wait_until


class TwoParts(GatedRunner):
    """Launches forward passes of tokens from 10 on by themselves; those of ``launch_errors`` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.draw_errors: dict[int, Exception] = {}
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
        (token,) = plan.chunks[0].token_ids
        if token in self.draw_errors:
            raise self.draw_errors[token]
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
    def pace(self) -> SetPace:
        return SetPace()

    @pytest.fixture
    def driver(self, runner: TwoParts, pace: SetPace) -> Iterator[Driver]:
        driver = Driver()
        driver.executor.close(10)
        driver.runner = runner
        driver.executor = OverlappedExecutor(runner, driver.woken.release, pace=pace)
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
        assert [part for part, _ in runner.threads] == ["forward", "forward", "draws"]

    def test_draws_that_fail_fail_their_step_alone(self, driver: Driver, runner: TwoParts) -> None:
        runner.draw_errors[10] = ValueError("no such row")
        driver.launch(10)
        failure = driver.failure()
        assert failure.step == 1 and str(failure.error) == "no such row"
        driver.launch(11)
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([11])
        assert [part for part, _ in runner.threads] == ["forward", "draws", "forward", "draws"]

    def test_the_loop_rehearses_its_own_launches_once(self, driver: Driver, runner: TwoParts, pace: SetPace) -> None:
        pace.wait = 3600.0
        for number, (token, parts) in enumerate([(9, ["draws"]), (10, ["forward", "draws", "rehearsal"])], start=1):
            driver.executor.rehearse()
            runner.threads.clear()
            driver.launch(token)
            runner.wait_launched(number)
            wait_until(lambda done=number: driver.executor._num_done == done)  # type: ignore[attr-defined]
            driver.executor.rehearse()
            driver.executor.rehearse()
            assert [part for part, _ in runner.threads] == parts
            driver.release(number)
            assert driver.result().outcome == StepOutput.of([token])
        assert runner.threads[-1] == ("rehearsal", threading.get_ident())

    def test_without_the_time_for_it_nothing_is_rehearsed(
        self, driver: Driver, runner: TwoParts, pace: SetPace
    ) -> None:
        pace.wait = 0.0
        driver.launch(10)
        driver.release(1)
        wait_until(lambda: driver.executor._num_done == 1)  # type: ignore[attr-defined]
        driver.executor.rehearse()
        assert driver.result().outcome == StepOutput.of([10])
        assert [part for part, _ in runner.threads] == ["forward", "draws"]

    def test_after_a_rehearsal_that_fails_the_thread_launches_alone(
        self, driver: Driver, runner: TwoParts, pace: SetPace, caplog: pytest.LogCaptureFixture
    ) -> None:
        pace.wait, runner.rehearsal_error = 3600.0, RuntimeError(ILLEGAL)
        driver.launch(10)
        runner.wait_launched(1)
        wait_until(lambda: driver.executor._num_done == 1)  # type: ignore[attr-defined]
        driver.executor.rehearse()
        assert "can't be rehearsed" in caplog.text
        for number, token in enumerate((10, 11), start=1):
            driver.release(number)
            assert driver.result().outcome == StepOutput.of([token])
            if token == 10:
                driver.launch(11)
        assert [part for part, _ in runner.threads] == ["forward", "draws", "rehearsal", "draws"]
