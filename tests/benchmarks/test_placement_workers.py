"""The case ``workers`` of the placement bench, on real workers and with small sizes."""

import itertools
import json
from pathlib import Path

import pytest

from splitserve.benchmarks.placement import workers
from splitserve.workloads.traces import read_trace

SIZES = {"SHAPE": "tiny", "KV_BYTES": 32 << 20, "NUM_PREFILL": 2, "LOADS": (0.5,), "NUM_WARM_UPS": 6, "NUM_TIMED": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a trace: two conversations of four requests, each of which begins with the one before."""
    lines = []
    for number in range(8):
        talk, turn = number % 2, number // 2
        blocks = [0, *(100 * (talk + 1) + each for each in range(3 * turn + 2))]
        lines.append(
            {
                "timestamp": 1000 * number,
                "input_length": 512 * len(blocks) - 12,
                "output_length": 96,
                "hash_ids": blocks,
            }
        )
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.mark.slow
def test_both_policies_serve_all_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(workers, name, size)
    rows = {row["arm"]: row for row in workers.workers(folder, 8, num_rounds=2)}
    assert list(rows) == list(workers.POLICIES)
    for row in rows.values():
        assert row["requests"] == 16 and len(row["round_p50_ms"]) == 2, row
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0 and row["queue_p99_ms"] > 0
        assert row["cluster_prompt_tokens_per_second"] > 0
    assert rows["least-loaded"]["local_share"] == 0 and rows["least-loaded"]["ttft_p50_below"] == 0
    assert rows["cost"]["cached_share"] > 0, "turns begin alike"


def test_a_scaled_trace_has_whole_conversations_with_shared_beginnings(folder: Path) -> None:
    small = workers.scaled(read_trace(folder / "conversation_trace.jsonl"), 4, seed=0)
    assert len(small.conversations) == 4
    prompts = [conversation.turns[0].pieces for conversation in small.conversations]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier) - 1] == earlier[:-1]
    assert {piece.num_tokens for prompt in prompts for piece in prompt[:-1]} == {512 // workers.SCALE}
    assert {turn.num_output_tokens for turn in small.turns()} == {96 // workers.SCALE}
