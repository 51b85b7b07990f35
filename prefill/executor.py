"""Runs steps beside the engine loop: the loop goes on receiving and renewing leases while the device computes."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from splitserve.step import MAX_STEPS_UNDER_WAY, StepOutput, StepPlan


class Runner(Protocol):
    """What the executor needs of a model runner."""

    def run(self, plan: StepPlan) -> StepOutput: ...


class LaunchedStep(Protocol):
    def wait(self) -> StepOutput: ...


class LaunchingRunner(Protocol):
    """A runner whose device runs steps by itself, one after the other."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


class Executor(Protocol):
    """What the engine loop needs of :class:`StepExecutor` and :class:`OverlappedExecutor`."""

    @property
    def has_room(self) -> bool: ...

    def launch(self, plan: StepPlan) -> None: ...

    def result(self) -> StepOutput | Exception | None: ...

    def close(self, timeout_seconds: float) -> None: ...


class StepExecutor:
    """One step at a time, on a thread of its own. ``wake`` is called from that thread when a result is there.

    On a CPU the "device" is this thread and the cores that its kernels use; they run with the GIL released.
    """

    def __init__(self, runner: Runner, wake: Callable[[], None]) -> None:
        self._runner = runner
        self._wake = wake
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepOutput | Exception] = queue.SimpleQueue()
        self.is_busy = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether :meth:`launch` may be called."""
        return not self.is_busy

    def launch(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self._plans.put(plan)

    def result(self) -> StepOutput | Exception | None:
        """The launched step's output, or the error that it ended with; None while it runs."""
        if self._results.empty():
            return None
        self.is_busy = False
        return self._results.get()

    def close(self, timeout_seconds: float) -> None:
        """Let the running step end, if it does so in time."""
        self._plans.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                result: StepOutput | Exception = self._runner.run(plan)
            except Exception as error:
                result = error
            self._results.put(result)
            self._wake()


class OverlappedExecutor:
    """Up to :data:`MAX_STEPS_UNDER_WAY` steps at once: the device has its next step before the last one is over.

    One thread launches, another one waits, so that a launch isn't held up by the step before it. Results come in the
    order of the launches. ``wake`` is called from the waiting thread when a result is there.
    """

    def __init__(self, runner: LaunchingRunner, wake: Callable[[], None]) -> None:
        self._runner = runner
        self._wake = wake
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[LaunchedStep | Exception | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepOutput | Exception] = queue.SimpleQueue()
        self._num_under_way = 0
        self._threads = [
            threading.Thread(target=run, name=f"model-{run.__name__.strip('_')}", daemon=True)
            for run in (self._launch, self._wait)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_room(self) -> bool:
        return self._num_under_way < MAX_STEPS_UNDER_WAY

    def launch(self, plan: StepPlan) -> None:
        assert self.has_room
        self._num_under_way += 1
        self._plans.put(plan)

    def result(self) -> StepOutput | Exception | None:
        """The oldest launched step's output, or the error that it ended with; None while it runs."""
        if self._results.empty():
            return None
        self._num_under_way -= 1
        return self._results.get()

    def close(self, timeout_seconds: float) -> None:
        """Let the launched steps end, if they do so in time."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _launch(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._launched.put(self._runner.launch(plan))
            except Exception as error:
                self._launched.put(error)
        self._launched.put(None)

    def _wait(self) -> None:
        while (step := self._launched.get()) is not None:
            try:
                result: StepOutput | Exception = step if isinstance(step, Exception) else step.wait()
            except Exception as error:
                result = error
            self._results.put(result)
            self._wake()
