"""Records some steps of a running worker with torch.profiler, and measures how busy its device was.

    idle --begin--> armed --the next step--> recording --num_steps later, or in time--> reporting --> idle
                      '--no step in time--> idle

Recording begins and ends on the thread that runs or launches the steps: operations of the host are recorded by thread.
The trace is written and read on a thread of its own, since it may be large.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from splitserve.engine.profiling.trace import NOT_BUSY, Busy, read_busy
from splitserve.engine.steps.executor import Runner
from splitserve.protocol.step import (
    LaunchedForward,
    LaunchedStep,
    LaunchingRunner,
    StepOutput,
    StepPlan,
    TwoPartRunner,
)

logger = logging.getLogger(__name__)

MAX_SETTLING_STEPS = 10  # beginning to record holds the first steps up: they don't count for how busy the device was
MAX_TRACES = 10  # of one worker: a trace may have hundreds of megabytes
NOT_ENABLED = "this worker was started without --profile-dir"


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The result of a recording. ``error`` is in words, "" after success; ``trace`` is then the file."""

    num_steps: int = 0
    error: str = ""
    trace: str = ""
    busy: Busy = NOT_BUSY


class Profiler(Protocol):
    """The part of :class:`StepProfiler` that the engine loop uses."""

    def begin(self, num_steps: int, timeout_seconds: float) -> str:
        """Record the next steps, for ``timeout_seconds`` at most; "", or why not."""

    def result(self) -> ProfileResult | None:
        """Return the last recording's result, once; None until it has ended."""

    @property
    def is_late(self) -> bool:
        """Return whether a recording continues only because no further step runs: :meth:`before_step` ends it."""

    def before_step(self) -> None:
        """Begin or end a recording if that is due. Called on the thread that runs steps."""


class NoProfiler:
    """Profiling is off."""

    def begin(self, num_steps: int, timeout_seconds: float) -> str:  # noqa: ARG002
        return NOT_ENABLED

    def result(self) -> ProfileResult | None:
        return None

    is_late = False

    def before_step(self) -> None: ...


class ProfilerState(Enum):
    IDLE = "idle"
    ARMED = "armed"
    RECORDING = "recording"
    REPORTING = "reporting"


class StepProfiler:
    """See the module. ``name`` begins the names of the files in ``directory``; ``wake`` is called with each result.

    Create it on the main thread: the profiler's library is set up on its first use, which belongs there, and would
    delay a step otherwise.
    """

    def __init__(self, directory: Path, name: str, device: torch.device, wake: Callable[[], None]) -> None:
        self._directory = directory
        self._name = name
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._wake = wake
        self._lock = threading.Lock()  # guards changes of the state
        self._state = ProfilerState.IDLE
        self._wanted_steps = 0
        self._deadline = 0.0
        self._results: queue.SimpleQueue[ProfileResult] = queue.SimpleQueue()
        self._num_traces = 0
        # Of the thread that runs steps alone:
        self._recording: profile | None = None
        self._num_steps = 0
        self._settled_ns = 0
        with profile(activities=self._activities):
            pass

    # ---- on the engine loop's thread ----

    def begin(self, num_steps: int, timeout_seconds: float) -> str:
        with self._lock:
            if self._state is not ProfilerState.IDLE:
                return "another profile is being recorded"
            self._deadline = time.monotonic() + timeout_seconds
            self._wanted_steps = num_steps
            self._state = ProfilerState.ARMED
            return ""

    def result(self) -> ProfileResult | None:
        is_late = self._state is ProfilerState.ARMED and time.monotonic() > self._deadline
        if is_late and self._change(ProfilerState.ARMED, ProfilerState.IDLE):
            return ProfileResult(error="no step ran in time")
        with suppress(queue.Empty):
            return self._results.get_nowait()
        return None

    @property
    def is_wanted(self) -> bool:
        """Return whether steps are to be recorded."""
        return self._state in (ProfilerState.ARMED, ProfilerState.RECORDING)

    @property
    def is_late(self) -> bool:
        return self._state is ProfilerState.RECORDING and time.monotonic() > self._deadline

    def _change(self, old: ProfilerState, new: ProfilerState) -> bool:
        """False if the state isn't ``old``: another thread was faster."""
        with self._lock:
            if self._state is not old:
                return False
            self._state = new
            return True

    # ---- on the thread that runs steps ----

    def before_step(self) -> None:
        if self._state is ProfilerState.ARMED:
            self._begin()
        elif self.is_late:
            self._end()

    def after_step(self) -> None:
        if self._state is ProfilerState.RECORDING:
            self._num_steps += 1
            if self._num_steps == min(MAX_SETTLING_STEPS, self._wanted_steps // 5):
                self._settled_ns = time.time_ns()
            if self._num_steps >= self._wanted_steps:
                self._end()

    def _begin(self) -> None:
        """A profiler that can't record is no reason for a step to fail."""
        if not self._change(ProfilerState.ARMED, ProfilerState.RECORDING):
            return
        logger.info("profile: recording %d steps", self._wanted_steps)
        self._num_steps, self._settled_ns = 0, 0
        self._recording = profile(activities=self._activities)
        try:
            self._recording.start()
        except Exception as error:
            self._report_error("can't record", error)

    def _end(self) -> None:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        self._change(ProfilerState.RECORDING, ProfilerState.REPORTING)
        try:
            recording.stop()
        except Exception as error:
            self._report_error("can't end the recording", error)
            return
        report = threading.Thread(
            target=self._write,
            args=(recording, self._num_steps, self._settled_ns),
            name="profile-report",
            daemon=True,
        )
        report.start()

    # ---- on a thread of its own ----

    def _write(self, recording: profile, num_steps: int, settled_ns: int) -> None:
        self._num_traces += 1
        path = self._directory / f"{self._name}-{time.strftime('%Y%m%dT%H%M%S')}-{self._num_traces}.pt.trace.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(path))
            busy = read_busy(path, settled_ns)
            remove_old_traces(self._directory, self._name)
        except Exception as error:
            self._report_error("no trace", error)
            return
        logger.info("profile: %d steps, %s; %s", num_steps, busy, path)
        self._report(ProfileResult(num_steps, "", str(path), busy))

    def _report_error(self, what: str, error: Exception) -> None:
        logger.error("profile: %s", what, exc_info=error)
        self._report(ProfileResult(error=f"{what}: {type(error).__name__}: {error}"))

    def _report(self, result: ProfileResult) -> None:
        self._results.put(result)
        with self._lock:
            self._state = ProfilerState.IDLE
        self._wake()


def remove_old_traces(directory: Path, name: str) -> None:
    """Remove all traces whose files are called ``name`` but the :data:`MAX_TRACES` written last, by any process."""
    pattern = re.compile(rf"{re.escape(name)}-\d{{8}}T\d{{6}}-\d+\.pt\.trace\.json")
    traces = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    traces.sort(key=lambda path: path.lstat().st_mtime_ns)
    for path in traces[:-MAX_TRACES]:
        path.unlink(missing_ok=True)


class ProfiledRunner:
    """A runner that calls ``profiler`` before its steps."""

    def __init__(self, runner: Runner, profiler: StepProfiler) -> None:
        self._runner = runner
        self._profiler = profiler

    def run(self, plan: StepPlan) -> StepOutput:
        self._profiler.before_step()
        output = self._runner.run(plan)
        self._profiler.after_step()
        return output


class ProfiledLaunchingRunner:
    """A launching runner that calls ``profiler`` before its steps. The end of a recording waits for the device.

    Steps that are recorded are launched as a whole (:class:`splitserve.protocol.step.TwoPartRunner`).
    """

    def __init__(self, runner: LaunchingRunner, profiler: StepProfiler) -> None:
        self._runner = runner
        self._two_part = runner if isinstance(runner, TwoPartRunner) else None
        self._profiler = profiler

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._profiler.before_step()
        pending = self._runner.launch(plan)
        self._profiler.after_step()
        return pending

    def launch_forward(self, plan: StepPlan) -> LaunchedForward | None:
        return None if self._two_part is None or self._profiler.is_wanted else self._two_part.launch_forward(plan)

    def rehearse(self) -> None:
        if self._two_part is not None and not self._profiler.is_wanted:
            self._two_part.rehearse()
