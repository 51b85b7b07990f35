"""Runs steps beside the engine loop: the loop goes on receiving and renewing leases while the device computes."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from splitserve.step import StepOutput, StepPlan


class Runner(Protocol):
    """What the executor needs of a model runner."""

    def run(self, plan: StepPlan) -> StepOutput: ...


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
