"""A runner whose device is a timer: steps take the times of a model instead of being computed."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.engine.steps.step_fit import work_of
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.step import StepOutput, StepPlan


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of consecutive steps with a full batch: the device's busy time and the host's processor time."""

    steps: int
    busy_share: float  # share of the time in which the device had work
    idle_ms: dict[str, float]  # time that the device waited for a step that it could have begun
    loop_cpu_us: float  # processor time per step of the loop's thread, launching included
    process_cpu_us: float  # processor time per step of all threads, launching included


@dataclass(frozen=True, slots=True)
class _Step:
    num_chunks: int
    is_decode: bool
    launched: float
    begin: float
    end: float
    loop_cpu_seconds: float
    process_cpu_seconds: float


@dataclass(frozen=True, slots=True)
class _Pending:
    output: StepOutput
    queued_at: float
    end: float

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return self.output


@dataclass(frozen=True, slots=True)
class _Forward:
    pending: _Pending
    draw_seconds: float

    def launch_draws(self) -> _Pending:
        _hold(self.draw_seconds)
        return self.pending


@dataclass(slots=True)
class PacedRunner:
    """Runner (:class:`splitserve.protocol.step.TwoPartRunner`) whose device is a timer.

    To launch a forward pass, or rehearse it, holds the interpreter for ``launch_seconds``, to launch draws for
    ``draw_seconds``. ``steps``: the steps that it ran.
    """

    model: StepModel  # of the steps' times
    vocab_size: int
    launch_seconds: float = 0.0
    draw_seconds: float = 0.0
    loop_clock: int = time.CLOCK_PROCESS_CPUTIME_ID
    free_at: float = 0.0
    steps: list[_Step] = field(default_factory=list)
    tokens: Iterator[int] = field(default_factory=itertools.count)  # to draw, modulo the size of the vocabulary

    def launch(self, plan: StepPlan) -> _Pending:
        """Queue a step; it takes the model's time."""
        return self._forward(plan).launch_draws()

    def launch_forward(self, plan: StepPlan) -> _Forward | None:
        """Queue a step of decodes alone, as replays are on a GPU."""
        return None if work_of(plan).prefill_tokens else self._forward(plan)

    def rehearse(self) -> None:
        _hold(self.launch_seconds)

    def _forward(self, plan: StepPlan) -> _Forward:
        _hold(self.launch_seconds)
        work = work_of(plan)
        launched = time.perf_counter()
        begin = max(launched, self.free_at)
        self.free_at = begin + self.model.seconds(work)
        self.steps.append(
            _Step(
                num_chunks=len(plan.chunks),
                is_decode=not work.prefill_tokens,
                launched=launched,
                begin=begin,
                end=self.free_at,
                loop_cpu_seconds=time.clock_gettime(self.loop_clock),
                process_cpu_seconds=time.process_time(),
            )
        )
        drawn = [None if chunk.sample is None else next(self.tokens) % self.vocab_size for chunk in plan.chunks]
        return _Forward(_Pending(StepOutput.of(drawn), time.monotonic(), self.free_at), self.draw_seconds)

    def report(self) -> DeviceReport | None:
        """Report on the longest run of decode steps with the largest number of sequences; None without one."""
        decodes = [step.num_chunks for step in self.steps if step.is_decode]
        full = max(decodes, default=0)
        runs = [
            list(run)
            for is_full, run in itertools.groupby(self.steps, key=lambda s: s.is_decode and s.num_chunks == full)
            if is_full
        ]
        steps = max(runs, key=len, default=[])
        if len(steps) < 3:
            return None
        first, last, count = steps[0], steps[-1], len(steps) - 1
        idle = [late.begin - early.end for early, late in itertools.pairwise(steps)]
        return DeviceReport(
            steps=len(steps),
            busy_share=sum(step.end - step.begin for step in steps) / (last.end - first.begin),
            idle_ms=percentiles_ms(idle),
            loop_cpu_us=1e6 * (last.loop_cpu_seconds - first.loop_cpu_seconds) / count,
            process_cpu_us=1e6 * (last.process_cpu_seconds - first.process_cpu_seconds) / count,
        )


def _hold(seconds: float) -> None:
    """Hold the interpreter."""
    ready = time.perf_counter() + seconds
    while time.perf_counter() < ready:
        pass
