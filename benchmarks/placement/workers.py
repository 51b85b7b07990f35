"""Case ``workers`` of the placement bench: the conversation trace on real workers, three prefill and a decode worker.

What the case ``load`` simulates, on a machine's CPU. The trace is scaled down: conversations are drawn from the whole
of it, and all lengths are divided by :data:`SCALE`, so that its blocks are those of the workers. It is sped up until
its prompt tokens arrive at a share of the measured speed at which the cluster serves requests that share nothing: all
processes share the machine's cores. The policies' clusters are up side by side, take turns, and begin each load with
empty caches.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from splitserve.benchmarks.goodput.clusters import reset_prefix_caches
from splitserve.benchmarks.goodput.probe import traces_of
from splitserve.benchmarks.serving.conversations import Prompts, TurnRecord, completion_body, run_in_processes
from splitserve.benchmarks.serving.load import Endpoint
from splitserve.common.errors import SplitserveError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import RequestSummary
from splitserve.protocol.config import EngineConfig
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload
from splitserve.workloads.traces import at_rate, read_trace

SHAPE = "small"
KV_BYTES = 512 << 20
NUM_PREFILL = 3
SCALE = 32
OPENING_BLOCKS = 2
"""Blocks that tell the trace's conversations apart: the first one is the same for all."""
LOADS = (0.8, 0.95, 1.1)
"""Prompt tokens that arrive, over those that the cluster computes if none is cached."""
VOCABULARY = range(10, 2000)
USUAL_REQUESTS = 200
"""Of each policy at each load in a round."""
NUM_WARM_UPS = 300
"""Requests of each policy that come before those that count: connections, and models of its workers' steps."""
NUM_TIMED = 60
"""Requests that come at once, and show the cluster's speed."""
BASE = "least-loaded"
POLICIES = (BASE, "cost")


@dataclass(slots=True)
class Measured:
    """Records of one policy's clients at one load, and the router's summaries of their requests."""

    turns: list[TurnRecord] = field(default_factory=list)
    summaries: list[RequestSummary] = field(default_factory=list)
    round_p50_ms: list[float] = field(default_factory=list)  # of TTFT

    def add(self, turns: Sequence[TurnRecord], summaries: Sequence[RequestSummary]) -> None:
        """Add the requests of a round."""
        self.turns += turns
        self.summaries += summaries
        self.round_p50_ms.append(float(np.median([1e3 * turn.record.ttft_seconds for turn in turns])))


def workers(directory: Path, num_requests: int, num_rounds: int) -> Iterator[dict[str, Any]]:
    """Compare TTFT and queueing of the policies at each load, ``num_rounds`` times about ``num_requests`` requests.

    Raises :class:`SplitserveError` if a cluster doesn't start or a request fails, :class:`ConfigError` for a trace that
    can't be read.
    """
    trace = read_trace(directory / "conversation_trace.jsonl")
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder, ExitStack() as stack:
        model = str(write_demo_model(folder, shape=SHAPE))
        engine = EngineConfig(model=model, device="cpu", dtype="float32", threads=1, kv_memory_bytes=KV_BYTES)
        clusters = {name: stack.enter_context(_cluster(name, engine)) for name in POLICIES}
        for cluster in clusters.values():
            _run(cluster, _unshared(NUM_TIMED, rate=4.0, name="first"), "f")
        speed = _speed(clusters[BASE])
        warm_up = _at_prompt_rate(scaled(trace, NUM_WARM_UPS, seed=-1), LOADS[0] * speed)
        for cluster in clusters.values():
            _run(cluster, warm_up, "w")
        measured = {(load, name): Measured() for load in LOADS for name in POLICIES}
        for number in range(num_rounds):
            drawn = scaled(trace, num_requests, seed=number)
            for load in LOADS:
                workload = _at_prompt_rate(drawn, load * speed)
                for name in POLICIES[:: -1 if number % 2 else 1]:
                    measured[load, name].add(*_round(clusters[name], workload, f"r{number}-{load}-"))
    for load in LOADS:
        yield from _rows(load, speed, {name: measured[load, name] for name in POLICIES})


def scaled(trace: Workload, num_requests: int, seed: int) -> Workload:
    """Return conversations of a trace of single requests, drawn from the whole of it until they have ``num_requests``,
    with all lengths divided by :data:`SCALE`."""
    talks: dict[tuple[Piece, ...], list[Conversation]] = {}
    for each in trace.conversations:
        talks.setdefault(each.turns[0].pieces[:OPENING_BLOCKS], []).append(each)
    drawn: list[Conversation] = []
    openings = list(talks)
    Random(seed).shuffle(openings)
    for opening in openings:
        if len(drawn) >= num_requests:
            break
        drawn += talks[opening]
    drawn.sort(key=lambda each: each.start_seconds)
    return Workload(trace.name, tuple(Conversation(c.name, c.start_seconds, (_smaller(c.turns[0]),)) for c in drawn))


def _smaller(turn: Turn) -> Turn:
    pieces = tuple(Piece(piece.name, max(1, piece.num_tokens // SCALE)) for piece in turn.pieces)
    return Turn(pieces, max(1, turn.num_output_tokens // SCALE))


def _unshared(num_requests: int, rate: float, name: str) -> Workload:
    """Return requests like the trace's mean one that share nothing."""
    turns = ((Turn((Piece(f"{name} {number}", 384),), 11),) for number in range(num_requests))
    return Workload(name, tuple(Conversation(f"{name}-{n}", n / rate, turn) for n, turn in enumerate(turns)))


def _at_prompt_rate(workload: Workload, tokens_per_second: float) -> Workload:
    mean = sum(turn.num_new_tokens for turn in workload.turns()) / workload.num_requests
    return at_rate(workload, tokens_per_second / mean, workload.num_requests)


def _cluster(policy: str, engine: EngineConfig) -> LocalCluster:
    spec = simple_spec(engine, port=0, num_prefill=NUM_PREFILL, num_decode=1, policy=policy)
    return LocalCluster(spec, log_level="warning")


def _speed(cluster: LocalCluster) -> float:
    """Return the prompt tokens per second that the cluster computes while all of its workers are busy."""
    workload = _unshared(NUM_TIMED, rate=1e4, name="timed")
    records = [turn.record for turn in _run(cluster, workload, "s")]
    seconds = max(record.end_seconds for record in records) - min(record.sent_seconds for record in records)
    return sum(record.input_tokens for record in records) / seconds


def _round(cluster: LocalCluster, workload: Workload, id_prefix: str) -> tuple[list[TurnRecord], list[RequestSummary]]:
    reset_prefix_caches(cluster.url)
    turns = _run(cluster, workload, id_prefix)
    return turns, [trace.summary for trace in traces_of(cluster.url, "", id_prefix)]


def _run(cluster: LocalCluster, workload: Workload, id_prefix: str) -> list[TurnRecord]:
    prompts = Prompts(VOCABULARY, 0, completion_body(cluster.spec.served_model_name))
    turns = run_in_processes(Endpoint(cluster.url, ""), workload, prompts, 1, id_prefix)
    if problem := next((turn.record.error for turn in turns if turn.record.error), ""):
        raise SplitserveError(f"a request of {id_prefix}{workload.name} failed: {problem}")
    return turns


def _rows(load: float, speed: float, measured: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each policy; the goal of ``cost`` is to be below the first one in TTFT and in queueing."""
    base: dict[str, Any] = {}
    for name, found in measured.items():
        row = _figures(found)
        base = base or row
        below = {f"{key}_below": 1.0 - row[f"{key}_ms"] / base[f"{key}_ms"] for key in ("ttft_p50", "queue_p99")}
        holds = name != "cost" or all(share > 0.0 for share in below.values())
        yield {"load": load, "arm": name, "cluster_prompt_tokens_per_second": speed, **row, **below, "holds": holds}


def _figures(found: Measured) -> dict[str, Any]:
    ttft = [1e3 * turn.record.ttft_seconds for turn in found.turns]
    gaps = np.concatenate([turn.record.gaps for turn in found.turns])
    records = [turn.record for turn in found.turns]
    return {
        "requests": len(ttft),
        "ttft_p50_ms": float(np.median(ttft)),
        "ttft_p99_ms": float(np.percentile(ttft, 99)),
        "round_p50_ms": found.round_p50_ms,
        "queue_p99_ms": float(np.percentile([_queueing_ms(summary) for summary in found.summaries], 99)),
        "itl_p99_ms": float(np.percentile(1e3 * gaps, 99)),
        "cached_share": sum(r.cached_tokens for r in records) / sum(r.input_tokens for r in records),
        "local_share": float(np.mean([summary.prefill == summary.decode for summary in found.summaries])),
    }


def _queueing_ms(summary: RequestSummary) -> float:
    """Return the time to first token less the request's own prefill."""
    return 1e3 * ((summary.ttft_seconds or 0.0) - summary.ttft_stages.get("prefill", 0.0))
