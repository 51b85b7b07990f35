"""The case ``turns`` of the placement bench: conversations on real workers, a prefill and a decode worker.

The first prompt has 1,024 tokens; four turns of 64 new tokens follow, each turn has 256 out. The clusters of all arms
are up side by side and take turns, a conversation at a time, so that a noisy machine disturbs all alike. On GPUs they
share two of these, a model of published shape with random weights in bfloat16; rounding may then decide a token, since
the KV that decode wrote was computed in other steps than those in which prefill would compute it.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splitserve.benchmarks.goodput.probe import traces_of
from splitserve.benchmarks.placement.blind_router import ENTRY as BLIND
from splitserve.benchmarks.serving.conversations import Prompts, TurnRecord, completion_body, run_conversations
from splitserve.benchmarks.serving.load import Endpoint
from splitserve.benchmarks.twin.calibration import report_of
from splitserve.common.errors import SplitserveError
from splitserve.models.demo.checkpoint import write_demo_config, write_demo_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.hosts.local import Entries
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import RequestSummary
from splitserve.protocol.config import EngineConfig
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload

FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS, NUM_TURNS = 1024, 64, 256, 5
SHAPE = "small"
KV_BYTES = 256 << 20
GPU_SHAPE = "llama-3.1-8b"
GPU_KV_BYTES = 4 << 30
VOCABULARY = range(10, 2000)
TARGET = 0.6
"""Share by which the default's TTFT is to be below that of the first arm, from the second turn on."""
WARM_UPS = 1
"""Conversations of each arm that come before those that count: connections, first steps, models of their times."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A router's policy, and the entry of its process."""

    policy: str
    router: str = Entries.router


ARMS = {
    "always, no output hashes": Arm("least-loaded", BLIND),
    "always, output hashes": Arm("least-loaded"),
    "default": Arm("cost"),
}
"""Always: every request goes to the pair. With the hashes of outputs prefill reads the turn before from decode."""


@dataclass(slots=True)
class Measured:
    """Records of one arm's clients, and the router's summaries of their requests."""

    turns: list[TurnRecord] = field(default_factory=list)
    summaries: list[RequestSummary] = field(default_factory=list)
    read_blocks: int = 0  # of prefixes, from the other worker, the warm-up included

    def ttft(self, *, first: bool) -> list[float]:
        """Return the times to first token of first turns, or of all others, in milliseconds."""
        return [1e3 * turn.record.ttft_seconds for turn in self.turns if (turn.number == 0) == first]


def turns(num_conversations: int, device: str = "cpu", dtype: str = "float32") -> Iterator[dict[str, Any]]:
    """Compare TTFT of turns after the first: always on a pair, without and with the hashes of outputs, and the default.

    ``dtype``: in float32 the model is the small one, on GPUs, too. Raises :class:`SplitserveError` if a cluster doesn't
    start or a request fails.
    """
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder, ExitStack() as stack:
        engine = _engine(folder, device, dtype)
        clusters = {name: stack.enter_context(_cluster(arm, engine)) for name, arm in ARMS.items()}
        measured = {name: Measured() for name in ARMS}
        for number in range(WARM_UPS + num_conversations):
            order = list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]
            for name in order:
                found = _talk(clusters[name], f"c{number}")
                if number >= WARM_UPS:
                    measured[name].turns += found
        for name, cluster in clusters.items():
            traces = traces_of(cluster.url, "", "c")
            begun = {f"c{number}-" for number in range(WARM_UPS)}
            measured[name].summaries = [t.summary for t in traces if not t.summary.request_id.startswith(tuple(begun))]
            measured[name].read_blocks = _read_blocks(cluster.url)
    for row in _rows(measured):
        yield {"device": device, "dtype": dtype, **row, "holds": row["holds"] or device != "cpu"}


def _engine(folder: str, device: str, dtype: str) -> EngineConfig:
    if dtype == "float32":
        model = str(write_demo_model(folder, shape=SHAPE))
        return EngineConfig(model=model, device=device, dtype=dtype, threads=1, kv_memory_bytes=KV_BYTES)
    model = str(write_demo_config(folder, shape=GPU_SHAPE))
    return EngineConfig(
        model=model, device=device, dtype=dtype, load_format="dummy", kv_memory_bytes=GPU_KV_BYTES, max_num_seqs=8
    )


def _cluster(arm: Arm, engine: EngineConfig) -> LocalCluster:
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, policy=arm.policy)
    return LocalCluster(spec, log_level="warning", entries=Entries(router=arm.router))


def _talk(cluster: LocalCluster, name: str) -> list[TurnRecord]:
    """Run one conversation to its end."""
    pieces = [Piece(f"{name} {turn}", NEW_TOKENS if turn else FIRST_TOKENS) for turn in range(NUM_TURNS)]
    made = Conversation(name, 0.0, tuple(Turn((piece,), OUTPUT_TOKENS) for piece in pieces))
    prompts = Prompts(VOCABULARY, 0, completion_body(cluster.spec.served_model_name))
    prefix = f"{name}-"
    found = asyncio.run(run_conversations(Endpoint(cluster.url, ""), Workload(name, (made,)), prompts, prefix))
    if problem := next((turn.record.error for turn in found if turn.record.error), ""):
        raise SplitserveError(f"a request of {name} failed: {problem}")
    return found


def _rows(measured: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    first, *_ = measured.values()
    base, answers = float(np.median(first.ttft(first=False))), _answers(first.turns)
    for name, found in measured.items():
        later = found.ttft(first=False)
        below = 1.0 - float(np.median(later)) / base
        gaps = np.concatenate([turn.record.gaps for turn in found.turns])
        yield {
            "arm": name,
            "requests": len(found.turns),
            "ttft_p50_ms": float(np.median(later)),
            "ttft_p99_ms": float(np.percentile(later, 99)),
            "first_ttft_p50_ms": float(np.median(found.ttft(first=True))),
            "itl_p50_ms": float(1e3 * np.median(gaps)),
            "ttft_p50_below": below,
            "cached_share": _cached_share(found.turns),
            "read_blocks": found.read_blocks,
            "local_share": float(np.mean([summary.prefill == summary.decode for summary in found.summaries])),
            "stages_ms": _stages(found.summaries),
            "same_answers": _answers(found.turns) == answers,
            "holds": name != "default" or below >= TARGET,
        }


def _read_blocks(url: str) -> int:
    """Return the blocks of prefixes that workers have read from others."""
    return sum(worker.load.peer_prefix_blocks for worker in report_of(url, "").workers)


def _answers(found: Sequence[TurnRecord]) -> list[tuple[str, int, list[int]]]:
    return sorted((turn.conversation, turn.number, turn.record.output_ids) for turn in found)


def _cached_share(found: Sequence[TurnRecord]) -> float:
    """Return the share of the prompt tokens after first turns that needed no computing."""
    later = [turn.record for turn in found if turn.number]
    return sum(record.cached_tokens for record in later) / sum(record.input_tokens for record in later)


def _stages(summaries: Sequence[RequestSummary]) -> dict[str, float]:
    """Return the median of each stage of the TTFT over turns after the first, in milliseconds."""
    later = [summary for summary in summaries if summary.num_prompt_tokens > FIRST_TOKENS]
    names = dict.fromkeys(name for summary in later for name in summary.ttft_stages)
    return {name: 1e3 * float(np.median([s.ttft_stages.get(name, 0.0) for s in later])) for name in names}
