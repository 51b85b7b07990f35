"""Runs steps beside the engine loop: the loop keeps receiving and renewing leases while the device computes."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from splitserve.engine.steps.failures import Failures, StepFailure, always_works
from splitserve.protocol.step import StepOutput, StepPlan


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
    """The interface of :class:`StepExecutor` and :class:`.overlapped.OverlappedExecutor` that the engine loop uses."""

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

    def rehearse(self) -> None:
        """Prepare that launch; no effect if that was done."""

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

    def rehearse(self) -> None:
        """See :class:`Executor`: no launch is prepared."""

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
            ended = time.monotonic()
            self._results.put(StepResult(step, plan, ended - started, outcome, ended, started))
            self._wake()
