"""Runs steps on a device that computes by itself: the next one is launched while one runs, just in time."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.engine.steps.executor import StepResult
from splitserve.engine.steps.failures import Failures, StepFailure, always_works
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.kvconnector.transfer.owner_thread import wait_precisely
from splitserve.protocol.step import (
    MAX_STEPS_IN_FLIGHT,
    LaunchedForward,
    LaunchedStep,
    LaunchingRunner,
    StepOutput,
    StepPlan,
    TwoPartRunner,
)

AWAKE_SECONDS = 0.0008
"""Time before a launch for which the loop stays awake: on virtual machines its core may take half of that to wake up,
and a rehearsal of the launch the other half."""
AWAKE_SHARE = 0.2
"""Largest share of the time without room that the loop stays awake."""
PUT_OFF_SECONDS = 0.0005
"""Longest time by which a launch is put off for a sequence whose KV is about to be there, which would wait for another
step. Launches are mostly faster than planned for, so the device waits for little of it."""
PUT_OFF_SHARE = 0.1
"""Largest share of the time without room by which a launch is put off."""
REHEARSAL_SECONDS = 0.0004
"""Time that a rehearsal takes before one was measured."""
_FORGOTTEN = 0.9  # of the time of the last rehearsal, each time that there is too little for another one

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Forward:
    """A step whose forward pass the loop has launched, for the thread that launches its draws."""

    plan: StepPlan
    started: float
    launched: LaunchedForward | Exception


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
    Forward passes that are quick to launch (:class:`splitserve.protocol.step.TwoPartRunner`) are launched by the caller
    of :meth:`launch`.
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
        self._two_part = runner if isinstance(runner, TwoPartRunner) else None
        self._plans: queue.SimpleQueue[StepPlan | _Forward | Callable[[], None] | None] = queue.SimpleQueue()
        self._num_given = 0  # plans and functions, to the thread that launches
        self._num_done = 0  # of them, by that thread
        self._rehearses = False  # for the next launch, once
        self._rehearsal_seconds = REHEARSAL_SECONDS
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
        forward = self._forward(plan)
        self._rehearses = forward is not None
        self._give(forward or plan)
        if len(self._in_flight) == 1:
            self._find_room(time.monotonic())

    def _give(self, work: StepPlan | _Forward | Callable[[], None]) -> None:
        self._num_given += 1
        self._plans.put(work)

    @property
    def _own_launcher(self) -> TwoPartRunner | None:
        """The runner, if this thread may launch: the one that launches has nothing to do."""
        return self._two_part if self._num_done == self._num_given else None

    def _forward(self, plan: StepPlan) -> _Forward | None:
        """Launch the step's forward pass, if that is quick."""
        if (launcher := self._own_launcher) is None:
            return None
        started = time.monotonic()
        try:
            launched = launcher.launch_forward(plan)
        except Exception as error:
            return _Forward(plan, started, error)
        return None if launched is None else _Forward(plan, started, launched)

    def rehearse(self) -> None:
        """See :class:`Executor`: if the last launch was this thread's, and there is time left."""
        if not self._rehearses or (launcher := self._own_launcher) is None:
            return
        self._rehearses = False
        began = time.monotonic()
        if self._room_at - began < self._rehearsal_seconds:
            self._rehearsal_seconds *= _FORGOTTEN
            return
        try:
            launcher.rehearse()
        except Exception:
            logger.exception("a launch can't be rehearsed: from now on the thread that launches does so alone")
            self._two_part = None
        self._rehearsal_seconds = time.monotonic() - began

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
        self._give(function)

    def close(self, timeout_seconds: float) -> None:
        """Let the launched steps end, if they do so in time."""
        self._plans.put(None)
        self._alarm.close()
        deadline = time.monotonic() + timeout_seconds
        for thread in (*self._threads, self._alarm.thread):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _launch(self) -> None:
        while (work := self._plans.get()) is not None:
            launched = self._launch_step(work) if isinstance(work, StepPlan | _Forward) else work()
            self._num_done += 1  # before the step can end, after which the loop may launch
            if launched is not None:
                self._launched.put(launched)
        self._launched.put(None)

    def _launch_step(self, work: StepPlan | _Forward) -> _Launched:
        """Launch a step, or what is left of it."""
        plan, started = (work, time.monotonic()) if isinstance(work, StepPlan) else (work.plan, work.started)
        try:
            if isinstance(work, StepPlan):
                step = self._runner.launch(work)
            elif isinstance(work.launched, Exception):
                raise work.launched
            else:
                step = work.launched.launch_draws()
        except Exception as error:
            return _Launched(plan, started, time.monotonic(), error)
        return _Launched(plan, started, step.queued_at, step)

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
