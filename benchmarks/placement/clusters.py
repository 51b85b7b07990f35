"""Clusters of the placement bench, and figures of a replay on them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.router.placement.policies import Policy
from splitserve.simulation.replay.cluster import ClusterSpec, ReplayCluster, pool
from splitserve.simulation.replay.results import ReplayResult, percentile
from splitserve.simulation.replay.worker import WorkerSpec
from splitserve.simulation.replay.workload import ReplayRequest

PREFILL_RATE = 30_000.0
"""Prompt tokens per second of a prefill worker of the trace cases."""
NUM_PREFILL = 8
HOST_TOKENS = 4_000_000
DEVICE_TOKENS = 400_000
CACHE_TOKENS = NUM_PREFILL * (HOST_TOKENS + DEVICE_TOKENS)

_PREFILL = WorkerSpec(
    "prefill",
    Role.PREFILL,
    StepModel(0.0, 0.0, 0.0, 1.0 / PREFILL_RATE, 0.0, 1000),
    kv_tokens=DEVICE_TOKENS,
    host_tokens=HOST_TOKENS,
)
_DECODE = WorkerSpec(  # so slow at prompts that the placement of prefill is what counts
    "decode",
    Role.DECODE,
    StepModel(5e-3, 1e-5, 5e-9, 1e-3, 0.0, 1000),
    kv_tokens=8_000_000,
    max_num_seqs=1024,
)
H200 = WorkerSpec(  # Llama-3.1-8B in bf16: kept results of `splitserve bench engine`, rounded
    "h200",
    Role.MIXED,
    StepModel(4e-3, 1.5e-5, 3.1e-8, 2.4e-5, 1.3e-9, 1000),
    shared_chunk_tokens=320,
    kv_tokens=800_000,
    max_num_seqs=256,
)


def trace_workers(slow_share: float = 0.0) -> list[WorkerSpec]:
    """Return the workers of the trace cases: 8 prefill, 2 decode. ``slow_share`` of the prefill workers take twice the
    time."""
    return [*pool(Role.PREFILL, NUM_PREFILL, _PREFILL, slow_share), *pool(Role.DECODE, 2, _DECODE)]


def gpu_workers(num_prefill: int, num_decode: int) -> list[WorkerSpec]:
    """Return workers like an H200 with an 8B model. A prefill worker computes whole chunks unless it decodes."""
    decode = replace(H200, chunk_tokens=2048)
    return [*pool(Role.PREFILL, num_prefill, H200), *pool(Role.DECODE, num_decode, decode)]


def replayed(
    workers: Sequence[WorkerSpec], policy: str | Policy, requests: Sequence[ReplayRequest], **options: Any
) -> ReplayResult:
    """Replay a workload on a cluster; ``options`` are those of :class:`ClusterSpec`."""
    return ReplayCluster(ClusterSpec(workers, policy, **options)).run(requests)


def figures(result: ReplayResult) -> dict[str, float]:
    """Return the figures that all cases share, times in milliseconds."""
    ttft, queue = result.ttft_seconds, result.queue_seconds
    by_worker = {name: seconds for name, seconds in result.queue_by_worker().items() if name.startswith("prefill")}
    mean = sum(by_worker.values()) / len(by_worker) if by_worker else 0.0
    return {
        "ttft_p50_ms": 1e3 * percentile(ttft, 50),
        "ttft_p99_ms": 1e3 * percentile(ttft, 99),
        "queue_p99_ms": 1e3 * percentile(queue, 99),
        "itl_p99_ms": 1e3 * result.gap_percentile(99),
        "queue_max_over_mean": max(by_worker.values()) / mean if mean else 0.0,
        "hit_blocks": result.hit_blocks,
        "local_share": sum(each.is_local for each in result.requests) / max(1, len(result.requests)),
        "empty_share": result.empty_share([name for name in result.memories if name.startswith("decode")]),
    }
