"""A worker whose device is lost once, amid its steps: an entry for the launcher in tests. Not a test module."""

import os
from collections.abc import Callable
from pathlib import Path

from splitserve.engine.profiling.step_profiler import StepProfiler
from splitserve.engine.steps.executor import Executor, StepExecutor
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.step import StepOutput, StepPlan
from splitserve.worker import entry

FAILS_AT = 12  # steps
ERROR = "CUDA error: an illegal memory access was encountered"


class LosesDevice:
    """Fails at a step of the first incarnation that gets so far, and then at every one."""

    def __init__(self, runner: ModelRunner, marker: Path) -> None:
        self._runner = runner
        self._marker = marker
        self._num_steps = 0
        self._is_lost = False

    def run(self, plan: StepPlan) -> StepOutput:
        self._num_steps += 1
        if self._num_steps == FAILS_AT and not self._marker.exists():
            self._marker.touch()
            self._is_lost = True
        self.check_device()
        return self._runner.run(plan)

    def check_device(self) -> None:
        if self._is_lost:
            raise RuntimeError(ERROR)


def make_executor(
    runner: ModelRunner, _ranks: object, _pace: object, wake: Callable[[], None], _profiler: StepProfiler | None
) -> Executor:
    faulty = LosesDevice(runner, Path(os.environ["LOST_DEVICE_MARKER"]))
    return StepExecutor(faulty, wake, faulty.check_device)


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    entry._make_executor = make_executor
    entry.run_worker(config, progress)
