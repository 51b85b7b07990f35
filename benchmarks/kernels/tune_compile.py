"""Compilation of the tuner's candidates in several processes at once: Triton's compiler uses one core of each.

A compiled kernel goes to Triton's cache on disk, where the tuner finds it. A candidate that fails here fails in the
tuner too, which reports it.
"""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from types import TracebackType

import torch

from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import Params
from splitserve.kernels.tuning.tunables import TunableCase, TuneTarget, load_tunable

_MAX_JOBS = 16  # each has a CUDA context and inputs of its own


class CompilePool:
    """Processes that compile; ``num_jobs`` 0: one per core, 1: none, the tuner compiles by itself."""

    def __init__(self, num_jobs: int) -> None:
        num_jobs = num_jobs or min(_MAX_JOBS, len(os.sched_getaffinity(0)))
        self._pool: ProcessPoolExecutor | None = None
        if num_jobs > 1:
            self._pool = ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compile(self, operation: str, target: TuneTarget, key: str, rows: int, candidates: Sequence[Params]) -> None:
        """Wait until each of ``candidates`` has been compiled, or has failed."""
        if self._pool is not None and len(candidates) > 1:
            run = functools.partial(_compile, operation, target, key, rows)
            wait([self._pool.submit(run, dict(candidate)) for candidate in candidates])


def _compile(operation: str, target: TuneTarget, key: str, rows: int, candidate: Params) -> None:
    if (case := _case(operation, target, key, rows)) is None:
        return
    with contextlib.suppress(Exception), tuning.forced(operation, candidate):
        case.calls()[0]()
        if target.device.type == "cuda":
            torch.cuda.synchronize()


@functools.lru_cache(maxsize=1)
def _case(operation: str, target: TuneTarget, key: str, rows: int) -> TunableCase | None:
    return load_tunable(operation).case(replace(target, is_for_compiling=True), key, rows)
