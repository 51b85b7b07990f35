"""Replays of workloads: exact times of small cases, readers of traces, and the placement's aims in a short form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from documents import ROOT
from splitserve.benchmarks.placement import cases
from splitserve.benchmarks.placement.clusters import CACHE_TOKENS, figures, replayed, trace_workers
from splitserve.benchmarks.placement.policies import ALWAYS, NEVER, fixed_threshold, unweighted
from splitserve.common.errors import ConfigError
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.replay.cluster import (
    LAST_CHUNK_TOKENS,
    MESSAGE_SECONDS,
    READ_SECONDS,
    ClusterSpec,
    ReplayCluster,
    pool,
)
from splitserve.simulation.replay.generated import Conversations
from splitserve.simulation.replay.results import pooled_hits
from splitserve.simulation.replay.worker import WorkerSpec
from splitserve.simulation.replay.workload import (
    BLOCK_TOKENS,
    ReplayRequest,
    at_prompt_rate,
    prompt_rate,
    read_requests,
    spread,
)

MODEL = StepModel(base=4e-3, per_decode=1e-4, per_context=1e-6, per_token=1e-5, per_pair=0.0, num_steps=1000)
WORKER = WorkerSpec("w", Role.MIXED, MODEL, kv_tokens=100_000, chunk_tokens=1000, shared_chunk_tokens=100)
TRACES = ROOT.parent / "shared" / "traces"


def run(requests, *workers, **options):
    return ReplayCluster(ClusterSpec(workers or (WORKER,), **options)).run(requests)


def pair_of(**changes):
    worker = replace(WORKER, **changes)
    return (*pool(Role.PREFILL, 1, worker), *pool(Role.DECODE, 1, worker))


def test_times_of_one_request_add_up() -> None:
    result = run([ReplayRequest(1.0, 2500, 11)])
    (figures,) = result.requests
    prefill = 3 * 4e-3 + 2500 * 1e-5  # chunks of 1000, 1000 and 500
    assert figures.first_token_at - 1.0 == pytest.approx(prefill + 2 * MESSAGE_SECONDS)
    assert figures.own_seconds == pytest.approx(prefill)
    steps = sum(4e-3 + 1e-4 + 1e-6 * (2500 + n) for n in range(10))
    assert figures.ended_at - figures.first_token_at == pytest.approx(steps)


def test_a_handover_takes_its_bytes_and_its_messages() -> None:
    worker = pair_of()
    result = run([ReplayRequest(0.0, 2500, 2)], *worker, policy=fixed_threshold(ALWAYS))
    (figures,) = result.requests
    assert not figures.is_local and figures.prefill == "prefill-0"
    read = READ_SECONDS + LAST_CHUNK_TOKENS * WORKER.token_bytes / WORKER.link_rate
    step = 4e-3 + 1e-4 + 1e-6 * 2500
    assert figures.ended_at - figures.first_token_at == pytest.approx(read + step)
    memory = result.memories["decode-0"]
    assert memory.used_tokens == 0 and 0 < memory.empty_token_seconds < memory.token_seconds


def test_a_leap_that_is_interrupted_changes_nothing() -> None:
    alone = run([ReplayRequest(0.0, 500, 200)])
    (first,) = alone.requests
    late = first.first_token_at + 0.1001
    both = run([ReplayRequest(0.0, 500, 200), ReplayRequest(late, 100, 1)])
    steps = both.requests[0].ended_at - first.ended_at
    assert steps == pytest.approx(100 * 1e-5, abs=1e-6), "one step of the first has the second's prompt in it"
    assert both.requests[1].first_token_at - late < 3 * (4e-3 + 100 * 1e-5 + 2e-3)


def test_a_batch_that_outgrows_its_memory_is_preempted_and_ends() -> None:
    small = replace(WORKER, kv_tokens=1200, max_num_seqs=8)
    result = run([ReplayRequest(0.0, 400, 300), ReplayRequest(0.0, 400, 300)], small)
    assert result.num_ended == 2 and result.workers["w"].num_preempted >= 1
    assert result.memories["w"].used_tokens == 0


@pytest.mark.parametrize("late_grants", [False, True])
@pytest.mark.parametrize("threshold", [ALWAYS, NEVER])
def test_all_requests_end_where_memory_is_short(late_grants: bool, threshold: float) -> None:
    requests = Conversations((200, 3000), (1, 120), 3, (10, 400), 0.5).requests(60, 8.0, seed=5)
    workers = pair_of(kv_tokens=9000, max_num_seqs=6)
    result = run(requests, *workers, policy=fixed_threshold(threshold), late_grants=late_grants)
    assert result.num_ended == len(requests) and result.num_refused == 0
    assert all(memory.used_tokens == 0 for memory in result.memories.values())


def test_late_grants_leave_less_room_empty() -> None:
    requests = Conversations((1000, 6000), (50, 200)).requests(150, 12.0, seed=6)
    workers = pair_of(kv_tokens=400_000, max_num_seqs=256)
    shares = [
        figures(run(requests, *workers, policy=fixed_threshold(ALWAYS), late_grants=late))["empty_share"]
        for late in (False, True)
    ]
    assert shares[1] < shares[0]


def test_a_turn_finds_its_conversation_with_and_without_events() -> None:
    requests = Conversations((2000, 3000), (600, 700), 4, (600, 800), 1.0).requests(20, 2.0, seed=7)
    most = sum(request.num_full_blocks(request.num_prompt_tokens - 1) for request in requests) - 20 * 4
    for events in (True, False):
        row = figures(replayed(trace_workers(), "cost", requests, kv_events=events, sends_sessions=False))
        assert row["hit_blocks"] >= 0.5 * most


def test_the_same_workload_gives_the_same_figures() -> None:
    requests = Conversations((100, 5000), (10, 200), 3, (10, 900), 2.0).requests(60, 6.0, seed=8)
    first, second = (figures(replayed(trace_workers(), "cost", requests)) for _ in range(2))
    assert first == second


def test_a_trace_has_the_blocks_of_its_prompts(tmp_path: Path) -> None:
    lines = [{"timestamp": 1500 * n, "input_length": 1200, "output_length": 5, "hash_ids": [0, n, n]} for n in (1, 2)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = read_requests(tmp_path / "t.jsonl")
    assert (first.arrives_at, second.arrives_at) == (0.0, 1.5)
    assert first.num_full_blocks(1200) == 2 and len(first.blocks) == 2
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    turns = "\n".join(json.dumps({"session_id": "a", "input_length": 9, "output_length": 1}) for _ in range(2))
    (tmp_path / "talk.jsonl").write_text(turns)
    with pytest.raises(ConfigError, match="only single requests are replayed"):
        read_requests(tmp_path / "talk.jsonl")


def test_speed_and_ticks_of_a_workload_can_be_set() -> None:
    requests = [ReplayRequest(3.0 * (n // 3), 100, 1) for n in range(9)]
    assert [r.arrives_at for r in spread(requests, 3.0)] == pytest.approx([float(n) for n in range(9)])
    assert prompt_rate(at_prompt_rate(requests, 50.0)) == pytest.approx(50.0)


def test_a_pooled_cache_finds_what_any_worker_had() -> None:
    blocks = [b"%d" % n for n in range(4)]
    requests = [ReplayRequest(0.0, 4 * BLOCK_TOKENS + 1, 1, blocks)] * 3
    assert pooled_hits(requests, CACHE_TOKENS) == 8
    assert pooled_hits(requests, 2 * BLOCK_TOKENS) == 4


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_beginning_of_a_trace_is_placed_well(name: str) -> None:
    requests = cases.trace(TRACES, name, 0.7, 1500)
    row = figures(replayed(trace_workers(), "cost", requests))
    base = figures(replayed(trace_workers(), unweighted, requests))
    assert row["hit_blocks"] >= 0.9 * pooled_hits(requests, CACHE_TOKENS)
    assert row["ttft_p99_ms"] <= 1.03 * base["ttft_p99_ms"] and row["queue_max_over_mean"] < 2.5


def test_load_is_placed_better_than_without_predictions() -> None:
    requests = Conversations((500, 9000), (100, 400), 5, (100, 2000), 5.0).requests(150, 5.0, seed=9)
    least = figures(replayed(trace_workers(0.5), "least-loaded", requests, knows_prefixes=False))
    cost = figures(replayed(trace_workers(0.5), "cost", requests))
    assert cost["ttft_p50_ms"] < 0.7 * least["ttft_p50_ms"]


def test_conditional_disaggregation_begins_sooner_than_always_and_never_without_longer_tails() -> None:
    requests = cases.workload("mixed", 0.7, 1000)
    cost, always, never = (
        cases._judged(requests, policy) for policy in ("cost", fixed_threshold(ALWAYS), fixed_threshold(NEVER))
    )
    assert cost["ttft_p50_ms"] < 0.97 * min(always["ttft_p50_ms"], never["ttft_p50_ms"])
    for p99 in ("ttft_p99_ms", "itl_p99_ms"):  # of one request; the order of a few changes it by a hundredth
        assert cost[p99] < 1.02 * min(always[p99], never[p99])


def test_decode_workers_help_with_long_prompts_before_prefill_is_late() -> None:
    """At a load that prefill workers alone cannot compute."""
    requests = cases.workload("long", 1.15, 600)
    cost, always = (cases._judged(requests, policy) for policy in ("cost", fixed_threshold(ALWAYS)))
    assert cost["goodput"] > 1.2 * always["goodput"]


def test_prefixes_that_prefill_has_computed_are_read_without_events() -> None:
    """By another prefill worker, while theirs is busy; as with events. Decode workers have few of them."""
    requests = Conversations((9000, 20_000), (2, 3), 4, (2000, 3000), 0.5).requests(120, 8.0, seed=11)
    announced, unknown = (
        figures(replayed(trace_workers(), "cost", requests, kv_events=each)) for each in (True, False)
    )
    assert unknown["hit_blocks"] >= 0.99 * announced["hit_blocks"]
    assert unknown["ttft_p50_ms"] <= 1.1 * announced["ttft_p50_ms"]


def test_a_worker_that_lies_gets_no_crowd() -> None:
    requests = Conversations((500, 4000), (50, 200)).requests(300, 25.0, seed=10)
    liar = StepModel(0.0, 0.0, 0.0, 1e-9, 0.0, num_steps=10**6)
    honest, lied_to = (
        replayed(trace_workers(), "cost", requests, published=published) for published in ({}, {"prefill-3": liar})
    )
    assert lied_to.workers["prefill-3"].num_prompts <= 4 * len(requests) / 8
    assert figures(lied_to)["ttft_p99_ms"] <= 6 * figures(honest)["ttft_p99_ms"]


def test_a_prompt_that_all_share_gathers_no_crowd() -> None:
    rows = {row["arm"]: row for row in cases.sessions(600)}
    assert rows["system prompt of all"]["holds"] and rows["cost, no keys"]["holds"]


def test_a_prompt_finds_what_earlier_steps_have_computed_of_the_one_before_it() -> None:
    """It begins in the last step of the first prompt, whose blocks aren't all there yet."""
    blocks = [bytes([number]) for number in range(4)]
    first, second = (ReplayRequest(at, 4 * BLOCK_TOKENS + 100, 2, blocks) for at in (0.0, 0.001))
    result = run([first, second])
    num_computed = 2 * WORKER.chunk_tokens
    assert result.requests[0].cached_tokens == 0
    assert result.requests[1].cached_tokens == num_computed // BLOCK_TOKENS * BLOCK_TOKENS > 0
