"""Suites of ``splitserve bench goodput``: workloads, objectives and sizes that fit a kind of machine."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite; its fields are defaults of the options with the same names."""

    workloads: tuple[str, ...]
    ttft_ms: float
    itl_ms: float
    percentile: float
    num_requests: int
    precision: float
    num_repeats: int
    max_probes: int
    chunk_budgets: tuple[int, ...]
    arms: tuple[str, ...] = ()  # empty: mixed workers with the engine's own chunks and each budget, and each split
    max_seconds: float = 0.0  # of one call; 0: no bound
    first_rate: float = 1.0
    twin: bool = True  # an arm's twin proposes the rate of its first probe


SUITES: Mapping[str, Suite] = {
    "smoke": Suite(
        workloads=("64/8",),
        ttft_ms=2000.0,
        itl_ms=500.0,
        percentile=90.0,
        num_requests=20,
        precision=1.0,
        num_repeats=1,
        max_probes=2,
        chunk_budgets=(),
        arms=("2M:least-loaded", "1P1D:least-loaded"),
        first_rate=4.0,
        twin=False,
    ),
    "cpu": Suite(
        workloads=("1024/32", "chats"),
        ttft_ms=500.0,
        itl_ms=60.0,
        percentile=95.0,
        num_requests=300,
        precision=0.15,
        num_repeats=1,
        max_probes=6,
        chunk_budgets=(128,),
        max_seconds=3480.0,
        first_rate=8.0,
    ),
    "gpu": Suite(
        workloads=("2048/512", "8192/64", "chats"),
        ttft_ms=500.0,
        itl_ms=15.0,
        percentile=99.0,
        num_requests=1000,
        precision=0.1,
        num_repeats=2,
        max_probes=10,
        chunk_budgets=(512, 2048),
        max_seconds=480.0,
    ),
}
