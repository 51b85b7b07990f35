"""Cases of the placement bench: each returns rows, with what is to hold and whether it does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from splitserve.benchmarks.placement.clusters import (
    CACHE_TOKENS,
    NUM_PREFILL,
    PREFILL_RATE,
    figures,
    gpu_workers,
    replayed,
    trace_workers,
)
from splitserve.benchmarks.placement.policies import ALWAYS, NEVER, fixed_threshold, unweighted
from splitserve.protocol.request import Role
from splitserve.router.placement.policies import Policy
from splitserve.simulation.replay.generated import Conversations, merged
from splitserve.simulation.replay.results import ReplayResult, pooled_hits
from splitserve.simulation.replay.workload import (
    ReplayRequest,
    at_prompt_rate,
    read_requests,
    spread,
    tick_of,
)

Row: TypeAlias = dict[str, Any]

ROUNDING = 1e-6
HIT_TARGETS = {"conversation": 0.92, "synthetic": 0.97}
LOAD_TARGETS = {0.8: 0.30, 0.95: 0.45, 1.1: 0.65}
THRESHOLDS = (ALWAYS, 128, 256, 512, 1024, 2048, 4096, NEVER)
TTFT_OBJECTIVE_MS, TPOT_OBJECTIVE_MS = 1000.0, 15.0


def trace(directory: Path, name: str, load: float, count: int) -> list[ReplayRequest]:
    """Return the first ``count`` requests of a trace (0: all), at ``load`` times the uncached speed."""
    requests = read_requests(directory / f"{name}_trace.jsonl")
    requests = spread(requests, tick_of(requests))[: count or None]
    return at_prompt_rate(requests, load * NUM_PREFILL * PREFILL_RATE)


def hits(directory: Path, count: int) -> Iterator[Row]:
    """Compare hits with a pooled cache, and the tail with that of unweighted milliseconds, at 70% load."""
    for name, target in HIT_TARGETS.items():
        requests = trace(directory, name, 0.7, count)
        oracle = pooled_hits(requests, CACHE_TOKENS)
        arms: list[tuple[str, str | Policy, bool]] = [
            ("unweighted", unweighted, True),
            ("cost", "cost", True),
            ("cost without events", "cost", False),
        ]
        base: Row = {}
        for label, policy, events in arms:
            row = figures(replayed(trace_workers(), policy, requests, kv_events=events))
            base = base or row
            share = row["hit_blocks"] / oracle
            holds = share >= target and row["queue_max_over_mean"] <= 1.5 and _no_higher(row, base, "ttft_p99_ms")
            yield {"trace": name, "arm": label, "hits_of_oracle": share, "holds": label == "unweighted" or holds, **row}


def _no_higher(row: Row, base: Row, name: str) -> bool:
    """Return whether a figure is no higher but for rounding: the same prompt may begin at another virtual time."""
    return bool(row[name] <= base[name] + ROUNDING)


def load(directory: Path, count: int) -> Iterator[Row]:
    """Compare with least-loaded placement that knows no prefixes, at several loads, and with half the workers slow."""
    for slow in (0.0, 0.5):
        for factor in (*LOAD_TARGETS, 1.3):
            requests = trace(directory, "conversation", factor * (1.0 - slow / 2), count)
            arms = {
                "least-loaded": replayed(trace_workers(slow), "least-loaded", requests, knows_prefixes=False),
                "cost": replayed(trace_workers(slow), "cost", requests),
            }
            rows = {label: figures(result) for label, result in arms.items()}
            p50, queue = (1.0 - rows["cost"][k] / rows["least-loaded"][k] for k in ("ttft_p50_ms", "queue_p99_ms"))
            is_target = factor in LOAD_TARGETS
            holds = p50 >= LOAD_TARGETS[factor] and queue >= 0.5 if is_target else rows["cost"]["ttft_p99_ms"] < 1e4
            for label, row in rows.items():
                below = {"ttft_p50_below": p50, "queue_p99_below": queue} if label == "cost" else {}
                yield {"load": factor, "slow_share": slow, "arm": label, "holds": holds, **row, **below}


def sessions(count: int) -> Iterator[Row]:
    """Compare conversations without keys with those that have them, and look at a system prompt that all share."""
    shape = Conversations((500, 6000), (100, 600), 6, (50, 1500), 20.0)
    named = shape.requests(max(40, count // 6), 3.0, seed=1)
    arms: dict[str, tuple[str, bool]] = {
        "session, keys": ("session", True),
        "cost, keys": ("cost", True),
        "cost, no keys": ("cost", False),
    }
    best = 0.0
    for label, (policy, has_keys) in arms.items():
        row = figures(replayed(trace_workers(), policy, named, sends_sessions=has_keys))
        best = max(best, row["hit_blocks"]) if has_keys else best
        yield {
            "arm": label,
            "holds": has_keys or row["hit_blocks"] >= 0.97 * best,
            "of_best": row["hit_blocks"] / best,
            **row,
        }
    shared = replace(shape, shared_tokens=4096, num_turns=1).requests(max(100, count), 20.0, seed=2)
    result = replayed(trace_workers(), "cost", shared)
    counts = [worker.num_prompts for name, worker in result.workers.items() if name.startswith(Role.PREFILL.value)]
    ratio = max(counts) / (sum(counts) / len(counts))
    yield {"arm": "system prompt of all", "holds": ratio <= 1.5, "prompts_max_over_mean": ratio, **figures(result)}


WORKLOADS = {
    "short": (Conversations((50, 500), (50, 300)), 40.0),
    "long": (Conversations((4000, 12_000), (50, 300)), 7.0),
    "cached": (Conversations((1000, 4000), (100, 300), 5, (50, 500), 5.0), 6.0),
}
"""Workloads of the case ``routes``, and the rates of their conversations about which two pairs are full."""


def workload(name: str, scale: float, count: int) -> list[ReplayRequest]:
    """Return a workload at ``scale`` times its usual rate, of about ``count`` requests."""
    if name != "mixed":
        shape, rate = WORKLOADS[name]
        return shape.requests(max(10, count // shape.num_turns), rate * scale, seed=3, name=name)
    parts = []
    for each, (shape, rate) in WORKLOADS.items():
        part_rate = rate * scale / 3
        seconds = count / (sum(r * s.num_turns for s, r in WORKLOADS.values()) * scale / 3)
        parts.append(shape.requests(max(4, round(seconds * part_rate)), part_rate, seed=3, name=each))
    return merged(*parts)


def routes(count: int, scales: Sequence[float]) -> Iterator[Row]:
    """Compare conditional disaggregation with fixed thresholds: requests per second that met both objectives."""
    for name in (*WORKLOADS, "mixed"):
        best: dict[str, Row] = {}
        for scale in scales:
            requests = workload(name, scale, count)
            arms: dict[str, Any] = {_label(tokens): fixed_threshold(tokens) for tokens in THRESHOLDS}
            for label, policy in {**arms, "cost": "cost"}.items():
                row = _judged(requests, policy)
                yield {"workload": name, "arm": label, "scale": scale, **row}
                if label not in best or row["goodput"] > best[label]["goodput"]:
                    best[label] = row
        rest = max(row["goodput"] for label, row in best.items() if label != "cost")
        ratio = best["cost"]["goodput"] / rest
        yield {"workload": name, "arm": "cost of the best threshold", "goodput_ratio": ratio, "holds": ratio >= 0.97}


def _label(tokens: float) -> str:
    return {ALWAYS: "always", NEVER: "never"}.get(tokens, f"above {tokens}")


def _judged(requests: Sequence[ReplayRequest], policy: Any) -> Row:
    objectives = {"ttft_ms": TTFT_OBJECTIVE_MS, "tpot_ms": TPOT_OBJECTIVE_MS}
    result = replayed(gpu_workers(2, 2), policy, requests, **objectives)
    return {"goodput": _goodput(requests, result), **figures(result)}


def _goodput(requests: Sequence[ReplayRequest], result: ReplayResult) -> float:
    met = 0
    for request, each in zip(requests, result.requests, strict=True):
        gaps = max(1, request.num_output_tokens - 1)
        tpot = (each.ended_at - each.first_token_at) / gaps
        ttft = each.first_token_at - each.arrived_at
        met += ttft <= TTFT_OBJECTIVE_MS / 1e3 and tpot <= TPOT_OBJECTIVE_MS / 1e3
    seconds = max(each.arrived_at for each in result.requests) - min(each.arrived_at for each in result.requests)
    return met / seconds


def room(count: int) -> Iterator[Row]:
    """Measure the share of decode's KV that is reserved and empty, with grants at once and late ones."""
    shape = Conversations((1000, 8000), (100, 400))
    for scale in (0.5, 0.9, 1.1):
        requests = shape.requests(count or 1000, 16.5 * scale, seed=4)
        for is_late in (False, True):
            result = replayed(gpu_workers(2, 2), fixed_threshold(ALWAYS), requests, late_grants=is_late)
            yield {
                "scale": scale,
                "arm": "late grants" if is_late else "grants at once",
                "holds": True,
                **figures(result),
            }
