"""Runs steps beside the engine loop: the loop keeps receiving and renewing leases while the device computes."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from splitserve.engine.steps.failures import Failures, StepFailure, always_works
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.kvconnector.transfer.owner_thread import wait_precisely
from splitserve.protocol.step import MAX_STEPS_IN_FLIGHT, LaunchedStep, LaunchingRunner, StepOutput, StepPlan

AWAKE_SECONDS = 0.0004
"""Time before a launch for which the loop stays awake: on virtual machines its core may take that long to wake up."""
AWAKE_SHARE = 0.1
"""Largest share of the time without room that the loop stays awake."""
PUT_OFF_SECONDS = 0.0005
"""Longest time by which a launch is put off for a sequence whose KV is about to be there, which would wait for another
step. Launches are mostly faster than planned for, so the device waits for little of it."""
PUT_OFF_SHARE = 0.1
"""Largest share of the time without room by which a launch is put off."""


class Runner(Protocol):
    """The part of a model runner that the executor uses."""

    def run(self, plan: StepPlan) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a launched step. ``seconds`` run from its launch, or from the end of the step before if that was
    later.

    Steps are numbered from 1 on, in the order of their launches. ``ended`` is the time of its end, ``on_device`` that
    at which it was launched (:attr:`LaunchedStep.queued_at`), both by the monotonic clock.
    """

    step: int
    plan: StepPlan
    seconds: float
    outcome: StepOutput | StepFailure
    ended: float = 0.0
    on_device: float = 0.0


class Executor(Protocol):
    """The interface of :class:`StepExecutor` and :class:`OverlappedExecutor` that the engine loop uses."""

    @property
    def has_room(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Return whether no step is in flight."""

    @property
    def is_put_off(self) -> bool:
        """Return whether a launch for which there is room is put off now."""

    @property
    def is_about_to_have_room(self) -> bool:
        """Return whether a step can be launched so soon that the loop isn't to sleep until then."""

    def put_off(self) -> bool:
        """Put off the launch for which there is room; return False if it can't be, any longer. The loop is woken when
        it can't."""

    def launch(self, plan: StepPlan) -> None: ...

    def result(self) -> StepResult | None: ...

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function``, which must not raise, on the thread that launches steps, after those launched so far."""

    def close(self, timeout_seconds: float) -> None: ...


class StepExecutor:
    """An executor of one step at a time, on a thread of its own. That thread calls ``wake`` when a result is there.

    On a CPU the "device" is this thread and the cores that its kernels use; they run with the GIL released.
    ``check_device``: see :class:`Failures`.
    """

    def __init__(
        self, runner: Runner, wake: Callable[[], None], check_device: Callable[[], None] = always_works
    ) -> None:
        self._runner = runner
        self._wake = wake
        self._failures = Failures(check_device)
        self._plans: queue.SimpleQueue[StepPlan | Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.is_busy = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Return whether :meth:`launch` may be called."""
        return not self.is_busy

    @property
    def is_idle(self) -> bool:
        """See :class:`Executor`."""
        return not self.is_busy

    @property
    def is_put_off(self) -> bool:
        """See :class:`Executor`: no launch is."""
        return False

    @property
    def is_about_to_have_room(self) -> bool:
        """See :class:`Executor`: the end of a step isn't known before."""
        return False

    def put_off(self) -> bool:
        """See :class:`Executor`: the device is idle."""
        return False

    def launch(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self._plans.put(plan)

    def result(self) -> StepResult | None:
        """Return the launched step's result; None while it runs."""
        if self._results.empty():
            return None
        self.is_busy = False
        return self._results.get()

    def call(self, function: Callable[[], None]) -> None:
        """See :class:`Executor`."""
        self._plans.put(function)

    def close(self, timeout_seconds: float) -> None:
        """Let the running step end, if it does so in time."""
        self._plans.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        step = 0
        while (plan := self._plans.get()) is not None:
            if not isinstance(plan, StepPlan):
                plan()
                continue
            step += 1
            started = time.monotonic()
            try:
                outcome: StepOutput | StepFailure = self._runner.run(plan)
            except Exception as error:
                outcome = self._failures.failure(step, error)
            self._results.put(StepResult(step, plan, time.monotonic() - started, outcome))
            self._wake()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step passed from the thread that launches to the thread that waits."""

    plan: StepPlan
    started: float
    on_device: float
    pending: LaunchedStep | Exception


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """``room_at``: since when it could have been launched beside the step before it; None without one, where a launch
    waits for copies, and where it was put off."""

    plan: StepPlan
    room_at: float | None


class _Alarm:
    """A timer that calls ``wake`` from a thread of its own; if several times are set, the last one counts."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._times: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="model-alarm", daemon=True)
        self.thread.start()

    def set(self, at: float) -> None:
        self._times.put(at)

    def close(self) -> None:
        self._times.put(None)

    def _run(self) -> None:
        wait_precisely()
        at = self._times.get()
        while at is not None:
            try:
                at = self._times.get(timeout=max(0.0, at - time.monotonic()))
            except queue.Empty:
                self._wake()
                at = self._times.get()


class OverlappedExecutor:
    """Up to :data:`MAX_STEPS_IN_FLIGHT` steps at once: the device has its next step before the last one is over.

    One thread launches, another one waits, so that a launch isn't held up by the step before it. Results come in the
    order of the launches. ``wake`` is called, from other threads, when a result is there and when there is room.
    ``check_device``: see :class:`Failures`. ``pace``: when there's room for a second step; at once without.
    """

    def __init__(
        self,
        runner: LaunchingRunner,
        wake: Callable[[], None],
        check_device: Callable[[], None] = always_works,
        pace: LaunchPace | None = None,
    ) -> None:
        self._runner = runner
        self._wake = wake
        self._failures = Failures(check_device)
        self._plans: queue.SimpleQueue[StepPlan | Callable[[], None] | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._in_flight: deque[_StepInFlight] = deque()
        self._pace = pace
        self._alarm = _Alarm(wake)
        self._room_at = 0.0  # when a second step may be launched beside the one in flight
        self._awake_at = 0.0  # since when the loop stays awake for that
        self._latest_at = 0.0  # until when that launch can be put off
        self._wakes_at = 0.0  # the time that the alarm was set to last
        self._was_put_off = False
        self._threads = [
            threading.Thread(target=run, name=f"model-{run.__name__.strip('_')}", daemon=True)
            for run in (self._launch, self._wait)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_room(self) -> bool:
        num_in_flight = len(self._in_flight)
        if not 0 < num_in_flight < MAX_STEPS_IN_FLIGHT:
            return num_in_flight == 0
        return time.monotonic() >= self._room_at

    @property
    def is_idle(self) -> bool:
        """See :class:`Executor`."""
        return not self._in_flight

    @property
    def is_put_off(self) -> bool:
        """See :class:`Executor`."""
        return self._was_put_off and time.monotonic() < self._latest_at

    @property
    def is_about_to_have_room(self) -> bool:
        """See :class:`Executor`."""
        if not 0 < len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            return False
        is_near = self._awake_at <= time.monotonic() < self._room_at
        if is_near:
            self._wake_at(self._room_at)  # which may be past when the loop has gone round once more
        return is_near

    def put_off(self) -> bool:
        """See :class:`Executor`."""
        if not self._in_flight or time.monotonic() >= self._latest_at:
            return False
        self._was_put_off = True
        self._wake_at(self._latest_at)
        return True

    def launch(self, plan: StepPlan) -> None:
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT
        is_beside = len(self._in_flight) > 0 and not (plan.gates or self._in_flight[0].plan.gates)
        tells = is_beside and not self._was_put_off
        self._in_flight.append(_StepInFlight(plan, self._room_at if tells else None))
        self._was_put_off = False
        self._plans.put(plan)
        if len(self._in_flight) == 1:
            self._find_room(time.monotonic())

    def result(self) -> StepResult | None:
        """Return the oldest launched step's result; None while it runs."""
        if self._results.empty():
            return None
        result = self._results.get()
        room_at = self._in_flight.popleft().room_at
        if self._pace is not None:
            self._pace.note_step(result.plan, result.seconds)
            if room_at is not None:
                self._pace.note_launch(result.on_device - room_at)
        if self._in_flight:
            self._find_room(result.ended)
        return result

    def _find_room(self, began: float) -> None:
        """Set the time at which a second step may be launched beside the one that began on the device at ``began``."""
        wait = 0.0 if self._pace is None else self._pace.seconds_to_wait(self._in_flight[0].plan)
        self._room_at = began + wait
        self._awake_at = self._room_at - min(AWAKE_SECONDS, AWAKE_SHARE * wait)
        self._latest_at = self._room_at + min(PUT_OFF_SECONDS, PUT_OFF_SHARE * wait)
        if self._room_at > time.monotonic():
            self._wake_at(self._awake_at)

    def _wake_at(self, at: float) -> None:
        if at != self._wakes_at:
            self._wakes_at = at
            self._alarm.set(at)

    def call(self, function: Callable[[], None]) -> None:
        """See :class:`Executor`."""
        self._plans.put(function)

    def close(self, timeout_seconds: float) -> None:
        """Let the launched steps end, if they do so in time."""
        self._plans.put(None)
        self._alarm.close()
        deadline = time.monotonic() + timeout_seconds
        for thread in (*self._threads, self._alarm.thread):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _launch(self) -> None:
        while (plan := self._plans.get()) is not None:
            if not isinstance(plan, StepPlan):
                plan()
                continue
            started = time.monotonic()
            try:
                step = self._runner.launch(plan)
                launched = _Launched(plan, started, step.queued_at, step)
            except Exception as error:
                launched = _Launched(plan, started, time.monotonic(), error)
            self._launched.put(launched)
        self._launched.put(None)

    def _wait(self) -> None:
        step, ended = 0, 0.0
        while (launched := self._launched.get()) is not None:
            step += 1
            outcome = self._outcome(step, launched.pending)
            started, ended = max(launched.started, ended), time.monotonic()
            self._results.put(StepResult(step, launched.plan, ended - started, outcome, ended, launched.on_device))
            self._wake()

    def _outcome(self, step: int, pending: LaunchedStep | Exception) -> StepOutput | StepFailure:
        if isinstance(pending, Exception):
            return self._failures.failure(step, pending)
        try:
            return pending.wait()
        except Exception as error:
            return self._failures.failure(step, error)
