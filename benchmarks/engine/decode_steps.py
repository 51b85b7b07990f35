"""Decode steps as a worker launches them, for ``splitserve bench engine``."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitserve.benchmarks.engine.sampling_modes import SamplingMode
from splitserve.benchmarks.engine.step_memory import SequenceTables
from splitserve.kernels.experts.weights import Router, RouterWeights
from splitserve.protocol.step import UNKNOWN_TOKEN, LaunchedStep, LaunchingRunner, ScheduledChunk, StepPlan


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Sequences that are decoded together, from ``first`` tokens each, all drawn in the same way. ``prompt_ids``: what
    penalties know of each; ``beside``: part of a prompt that each step computes, too, the same each time."""

    tables: Sequence[SequenceTables]
    first: int
    mode: SamplingMode
    prompt_ids: Sequence[int] = ()
    beside: ScheduledChunk | None = None

    def seconds(self, runner: LaunchingRunner, warm_up: int, count: int) -> float:
        """Return the seconds of ``count`` steps, from the end of the last of ``warm_up`` steps to that of the last.

        Each step is launched while the one before it runs.
        """
        pending: deque[LaunchedStep] = deque()
        ends: list[float] = []

        def finish() -> None:
            pending.popleft().wait()
            ends.append(time.perf_counter())

        for step in range(warm_up + count):
            pending.append(runner.launch(StepPlan(self._chunks(step))))
            if len(pending) > 1:
                finish()
        while pending:
            finish()
        return ends[-1] - ends[warm_up - 1]

    def _chunks(self, step: int) -> list[ScheduledChunk]:
        at = self.first + step
        chunks = []
        for index, sequence in enumerate(self.tables):
            table, others = sequence.upto(at, at + 1)
            spec = self.mode.spec(index, at + 1, self.prompt_ids if step == 0 else None)
            token, previous = (UNKNOWN_TOKEN, index) if step else (1, None)
            chunks.append(ScheduledChunk([token], at, table, spec, previous, other_tables=others))
        return chunks if self.beside is None else [*chunks, self.beside]


@dataclass(slots=True)
class HitExperts:
    """A maker of routers that notes the experts which they choose while :meth:`noting` runs."""

    pack_router: Callable[[RouterWeights], Router]
    _noted: list[Tensor] | None = field(default=None, init=False)

    def __call__(self, weights: RouterWeights) -> Router:
        """See :class:`splitserve.kernels.api.Kernels`."""
        router = self.pack_router(weights)

        def noting(x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            normed, experts, factors = router(x, norm, eps, normed)
            if self._noted is not None:
                self._noted.append(experts)
            return normed, experts, factors

        return noting

    @contextmanager
    def noting(self) -> Iterator[Callable[[], float | None]]:
        """Note the experts of the steps that run meanwhile: their mean number in a layer's step, None without any."""
        noted = self._noted = []
        try:
            yield lambda: _mean_hit(noted)
        finally:
            self._noted = None


def _mean_hit(choices: Sequence[Tensor]) -> float | None:
    counts = [int(torch.unique(experts).numel()) for experts in choices]
    return sum(counts) / len(counts) if counts else None
