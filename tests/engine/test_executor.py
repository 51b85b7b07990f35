"""Executors with a runner whose steps the test lets go on, one by one; and which steps count as too slow."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from gated_runner import ILLEGAL, Driver, SetPace, plan_of
from splitserve.engine.steps import overlapped
from splitserve.engine.steps.executor import StepExecutor
from splitserve.engine.steps.failures import Failures, StepFailure
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.protocol.step import MAX_STEPS_IN_FLIGHT, StepOutput, StepPlan
from waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


class TestOverlapped:
    def test_two_steps_are_in_flight_and_no_third(self, driver: Driver) -> None:
        driver.launch(5, 6)
        driver.runner.wait_launched(2)  # the second one, while the first one runs
        assert not driver.executor.has_room
        assert driver.executor.result() is None
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([5])
        assert driver.executor.has_room
        driver.launch(7)
        driver.runner.wait_launched(3)
        assert not driver.executor.has_room

    def test_results_come_in_the_order_of_the_launches(self, driver: Driver) -> None:
        driver.launch(5, 6)
        driver.release(2)
        time.sleep(0.05)
        assert driver.executor.result() is None, "the first step still runs"
        driver.release(1)
        first, second = driver.result(), driver.result()
        assert (first.step, first.outcome, first.plan) == (1, StepOutput.of([5]), plan_of(5))
        assert (second.step, second.outcome, second.plan) == (2, StepOutput.of([6]), plan_of(6))

    def test_a_step_that_waits_behind_another_is_not_slow(self, driver: Driver) -> None:
        driver.launch(5, 6)
        driver.runner.wait_launched(2)
        time.sleep(0.2)
        released = time.monotonic()
        driver.release(1)
        driver.release(2)
        first, second = driver.result(), driver.result()
        assert first.seconds >= 0.2
        assert second.seconds <= time.monotonic() - released, "from the first one's end, not from its launch"

    def test_an_error_comes_out_as_it_is(self, driver: Driver) -> None:
        error = ValueError("no finite logits")
        driver.runner.step_errors[5] = error
        driver.launch(5)
        driver.release(1)
        failure = driver.failure()
        assert failure == StepFailure(1, error)
        assert str(failure) == "ValueError: no finite logits"

    def test_an_error_of_the_launch_comes_after_the_steps_before_it(self, driver: Driver) -> None:
        driver.runner.launch_errors[6] = RuntimeError("no such graph")
        driver.launch(5, 6)
        driver.runner.wait_launched(2)
        time.sleep(0.05)
        assert driver.executor.result() is None
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([5])
        assert str(driver.failure()) == "RuntimeError: no such graph"

    def test_a_later_steps_error_names_the_first_one(self, driver: Driver) -> None:
        """The launch of the second step reports what the first one has done to the device."""
        driver.device_works = False
        driver.runner.step_errors[5] = RuntimeError(ILLEGAL)
        driver.runner.launch_errors[6] = RuntimeError("CUDA error: unspecified launch failure")
        driver.launch(5, 6)
        driver.release(1)
        first, second = driver.failure(), driver.failure()
        assert (first.cause, str(first)) == (None, f"RuntimeError: {ILLEGAL}")
        assert (second.cause, str(second)) == (first, f"failed because of step 1: RuntimeError: {ILLEGAL}")
        assert first.device_lost and second.device_lost

    def test_a_device_that_survives_an_error_goes_on(self, driver: Driver) -> None:
        for token in (5, 6, 8):
            driver.runner.step_errors[token] = ValueError(f"step with {token}")
        driver.launch(5, 6)
        driver.release(1)
        driver.release(2)
        first, second = driver.failure(), driver.failure()
        assert (first.device_lost, second.cause) == (False, first)
        driver.launch(7, 8)
        driver.release(3)
        driver.release(4)
        assert driver.result().outcome == StepOutput.of([7])
        assert str(driver.failure()) == "ValueError: step with 8", "it has nothing to do with the first one"

    def test_a_call_runs_on_the_thread_that_launches(self, driver: Driver) -> None:
        names: list[str] = []
        driver.launch(5)
        driver.runner.wait_launched(1)
        driver.executor.call(lambda: names.append(threading.current_thread().name))
        driver.launch(6)
        driver.runner.wait_launched(2)  # which comes after it
        assert names == ["model-launch"]
        driver.release(1)
        driver.release(2)
        assert [driver.result().step for _ in range(2)] == [1, 2], "a call is no step"

    def test_close_lets_the_launched_steps_end(self, driver: Driver) -> None:
        driver.launch(5, 6)
        driver.runner.wait_launched(2)
        threading.Timer(0.1, lambda: [step.release.set() for step in driver.runner.launched]).start()
        driver.executor.close(10)
        assert [driver.result().outcome for _ in range(2)] == [StepOutput.of([5]), StepOutput.of([6])]

    def test_close_does_not_wait_for_a_step_that_hangs(self, driver: Driver) -> None:
        driver.launch(5, 6)
        driver.runner.wait_launched(2)
        driver.executor.close(0.2)


class TestOneAtATime:
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = Driver()
        driver.executor.close(10)
        driver.executor = StepExecutor(driver.runner, driver.woken.release)
        yield driver
        driver.close()

    def test_one_step_after_another(self, driver: Driver) -> None:
        driver.runner.step_errors[6] = ValueError("no finite logits")
        for number, token in enumerate((5, 6, 7), start=1):
            driver.launch(token)
            assert not driver.executor.has_room
            driver.release(number)
            result = driver.result()
            assert (result.step, result.plan) == (number, plan_of(token))
            expected = "ValueError: no finite logits" if token == 6 else str(StepOutput.of([token]))
            assert str(result.outcome) == expected

    def test_a_call_waits_for_the_step_before_it(self, driver: Driver) -> None:
        called = threading.Event()
        driver.launch(5)
        driver.executor.call(called.set)
        driver.runner.wait_launched(1)
        assert not called.wait(0.05)
        driver.release(1)
        assert driver.result().step == 1 and called.wait(PATIENCE_SECONDS)

    def test_close_does_not_wait_for_a_step_that_hangs(self, driver: Driver) -> None:
        driver.launch(5)
        driver.runner.wait_launched(1)
        driver.executor.close(0.2)


def test_after_the_device_is_lost_every_failure_is_its() -> None:
    def check() -> None:
        raise RuntimeError(ILLEGAL)

    failures = Failures(check)
    first = failures.failure(3, RuntimeError(ILLEGAL))
    much_later = failures.failure(3 + 10 * MAX_STEPS_IN_FLIGHT, RuntimeError("?"))
    assert much_later.cause is first and much_later.device_lost


class TestLateLaunch:
    @pytest.fixture
    def pace(self) -> SetPace:
        return SetPace()

    @pytest.fixture
    def driver(self, pace: SetPace) -> Iterator[Driver]:
        driver = Driver()
        driver.executor.close(10)
        driver.executor = OverlappedExecutor(driver.runner, driver.woken.release, pace=pace)
        yield driver
        driver.close()

    def test_there_is_no_room_beside_a_step_until_it_is_time(self, driver: Driver, pace: SetPace) -> None:
        pace.wait = 3600.0
        driver.launch(5)
        assert not driver.executor.has_room
        driver.release(1)
        assert driver.result().outcome == StepOutput.of([5])
        driver.launch(6)  # the device is idle: at once
        driver.runner.wait_launched(2)
        assert pace.launches == []

    def test_the_loop_is_woken_when_it_is_time(self, driver: Driver, pace: SetPace) -> None:
        pace.wait = 0.02
        driver.launch(5)
        assert driver.woken.acquire(timeout=PATIENCE_SECONDS)
        assert driver.executor.result() is None  # it runs on
        wait_until(lambda: driver.executor.has_room)
        driver.launch(6)
        driver.release(1)
        pace.wait = 0.03  # counted from the end of the first one
        assert driver.result().outcome == StepOutput.of([5])
        assert driver.woken.acquire(timeout=PATIENCE_SECONDS)
        wait_until(lambda: driver.executor.has_room)
        driver.launch(7)
        driver.release(2)
        driver.release(3)
        assert [driver.result().outcome for _ in range(2)] == [StepOutput.of([6]), StepOutput.of([7])]
        assert len(pace.launches) == 2 and min(pace.launches) > 0.0

    @pytest.mark.parametrize(("wait", "awake"), [(0.007, 0.0008), (0.001, 0.0002)])
    def test_the_loop_stays_awake_right_before(
        self, driver: Driver, pace: SetPace, wait: float, awake: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But for no more than a fifth of the time."""
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(overlapped.time, "monotonic", lambda: clock.now)
        pace.wait = wait
        executor = driver.executor
        assert executor.has_room and not executor.is_about_to_have_room
        driver.launch(5)
        for clock.now in (1000.0, 1000.0 + wait - 1.1 * awake):
            assert not executor.is_about_to_have_room and not executor.has_room
        alarms: list[float] = []
        monkeypatch.setattr(executor._alarm, "set", alarms.append)  # type: ignore[union-attr]
        for clock.now in (1000.0 + wait - 0.9 * awake, 1000.0 + wait - 0.1 * awake):
            assert executor.is_about_to_have_room and not executor.has_room
        assert alarms == [1000.0 + wait], "the loop may go to sleep right before, and is then woken"
        clock.now = 1000.0 + wait + 1e-6
        assert executor.has_room and not executor.is_about_to_have_room
        driver.launch(6)
        clock.now = 1000.0 + wait - 0.5 * awake
        assert not executor.is_about_to_have_room, "two steps are in flight"

    @pytest.mark.parametrize(("wait", "longest"), [(0.007, 0.0005), (0.001, 0.0001)])
    def test_a_launch_is_put_off_for_a_moment(
        self, driver: Driver, pace: SetPace, wait: float, longest: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(overlapped.time, "monotonic", lambda: clock.now)
        assert not driver.executor.put_off(), "the device is idle"
        pace.wait = wait
        driver.launch(5)
        clock.now = 1000.0 + wait + 0.9 * longest
        assert not driver.executor.is_put_off
        assert driver.executor.has_room and driver.executor.put_off() and driver.executor.has_room
        assert driver.executor.is_put_off
        clock.now = 1000.0 + wait + 1.1 * longest
        assert not driver.executor.put_off() and not driver.executor.is_put_off
        driver.launch(6)
        driver.release(1)
        wait_until(lambda: driver.executor.result() is not None)
        driver.release(2)
        wait_until(lambda: driver.executor.result() is not None)
        assert pace.launches == [], "how long it took tells nothing"

    def test_a_launch_that_is_not_late_is_not_put_off(self, driver: Driver, pace: SetPace) -> None:
        driver.launch(5)
        assert driver.executor.has_room and not driver.executor.put_off()

    def test_launches_that_wait_for_copies_tell_nothing(self, driver: Driver, pace: SetPace) -> None:
        """Nor do those behind them."""
        plans = [plan_of(5), plan_of(6), plan_of(7), plan_of(8)]
        plans[1] = StepPlan([msgspec.structs.replace(plans[1].chunks[0], gates=(3,))])
        driver.executor.launch(plans[0])
        for number, plan in enumerate(plans[1:], start=1):
            driver.executor.launch(plan)
            driver.release(number)
            assert driver.result().step == number
        assert len(pace.launches) == 0
        driver.release(4)
        assert driver.result().step == 4
        assert len(pace.launches) == 1, "of the last one, beside the one behind"
