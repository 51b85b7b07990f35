"""A worker's start: the steps of the warm-up, attention kernels loaded in a thread, the clock of its phases."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedAttention, PagedBatch
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from splitserve.protocol.step import UNKNOWN_TOKEN, ScheduledChunk, StepPlan
from splitserve.worker.entry import set_up_ucx
from splitserve.worker.start.beside import Beside
from splitserve.worker.start.clock import StartClock, process_age_seconds
from splitserve.worker.start.warm_up import (
    StepLimits,
    all_plans,
    chunk_lengths,
    few_plans,
    load_attention,
    overlapped_plans,
    warm_up,
)

CPU = torch.device("cpu")
H200 = StepLimits(
    max_num_batched_tokens=8192,
    max_num_prefill_tokens_beside_decode=320,
    max_num_prefill_tokens_within_objective=576,
    max_num_seqs=256,
    max_model_len=131072,
    num_blocks=12_000,
    block_size=64,
)
TIGHT = StepLimits(
    max_num_batched_tokens=8,
    max_num_prefill_tokens_beside_decode=8,
    max_num_prefill_tokens_within_objective=16,
    max_num_seqs=1,
    max_model_len=6,
    num_blocks=2,
    block_size=4,
)
SMALL = StepLimits(
    max_num_batched_tokens=96,
    max_num_prefill_tokens_beside_decode=40,
    max_num_prefill_tokens_within_objective=40,
    max_num_seqs=5,
    max_model_len=128,
    num_blocks=8,
    block_size=16,
)


def is_decode(chunk: ScheduledChunk) -> bool:
    return len(chunk.token_ids) == 1 and chunk.sample is not None


def check_plan(plan: StepPlan, limits: StepLimits) -> None:
    """A scheduler could have made it: decode tokens first, all bounds kept, a block for each token."""
    decodes = [chunk for chunk in plan.chunks if is_decode(chunk)]
    assert plan.num_tokens <= limits.max_num_batched_tokens
    assert len(plan.chunks) <= max(limits.max_num_seqs, 3)
    assert list(plan.chunks[: len(decodes)]) == decodes or len(plan.chunks[-1].token_ids) == 1
    for chunk in plan.chunks:
        end = chunk.start + len(chunk.token_ids)
        assert end <= limits.max_model_len
        assert len(chunk.block_ids) * limits.block_size >= end
        assert all(0 <= block_id < limits.num_blocks for block_id in chunk.block_ids)


@pytest.mark.parametrize("limits", [H200, SMALL, TIGHT], ids=["h200", "small", "tight"])
def test_steps_keep_the_bounds(limits: StepLimits) -> None:
    plans = [*all_plans(limits), *few_plans(limits)]
    for plan in plans:
        check_plan(plan, limits)
    for first, second in overlapped_plans(limits):
        check_plan(first, limits)
        check_plan(second, limits)
        (follower, *_) = second.chunks
        assert follower.previous_chunk == 0 and list(follower.token_ids) == [UNKNOWN_TOKEN]
        assert first.chunks[0].sample is not None


def test_steps_on_a_gpu_cover_every_kind_of_size() -> None:
    plans = list(all_plans(H200))
    alone = {len(plan.chunks[0].token_ids) for plan in plans if len(plan.chunks) == 1 and plan.chunks[0].start == 0}
    assert {1, 63, 64, 65, 320 // 5, 1024, 8192} <= alone
    assert {length % 2 for length in alone} == {0, 1}
    mixed = [plan for plan in plans if is_decode(plan.chunks[0]) and not is_decode(plan.chunks[-1])]
    assert {320, 448, 576} <= {len(plan.chunks[-1].token_ids) for plan in mixed}
    assert {1, 16, 64, 255} <= {len(plan.chunks) - 1 for plan in mixed}
    assert any(plan.chunks[-1].sample is None for plan in mixed)
    assert any(plan.chunks[-1].start for plan in mixed)
    ways = {
        (chunk.sample.temperature > 0, chunk.sample.top_k > 0, chunk.sample.top_p < 1)
        for plan in plans
        for chunk in plan.chunks
        if chunk.sample is not None
    }
    assert ways >= {(False, False, False), (True, False, False), (True, True, False), (True, False, True)}
    assert max(chunk.start for plan in plans for chunk in plan.chunks) == H200.max_model_len - 1
    assert sum(plan.num_tokens for plan in plans) < 20 * H200.max_num_batched_tokens, "it has to be quick, too"


@pytest.mark.parametrize("longest", [1, 5, 16, 512, 8192])
def test_chunk_lengths(longest: int) -> None:
    lengths = chunk_lengths(longest, 64)
    assert lengths[0] == 1 and lengths[-1] == longest and len(lengths) == len(set(lengths))
    for power in (16, 256, 4096):
        if 2 * power <= longest:
            assert any(length % 16 for length in lengths if power <= length < 2 * power)
            assert any(length % 16 == 0 for length in lengths if power <= length < 2 * power)
    assert sum(lengths) < 5 * longest + 20_000


def test_all_steps_run_and_leave_no_trace(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    model = load_model(tiny_qwen3, config, dtype=torch.float32, device=CPU)
    shape = (SMALL.num_blocks, config.num_layers, config.num_kv_heads, 2, SMALL.block_size, config.head_dim)
    runner = ModelRunner(model, torch.zeros(shape))
    assert warm_up(runner, SMALL) == 2, "steps on a CPU cost more than they would save"
    assert not runner.cache.groups[0].any()
    for plan in all_plans(SMALL):
        drawn = runner.run(plan).token_ids
        assert [token is None for token in drawn] == [chunk.sample is None for chunk in plan.chunks]


def test_attention_kernels_are_loaded_by_each_kind_of_step() -> None:
    loaded = select_kernels(CPU, torch.float32)
    steps: list[list[int]] = []

    def noting(shape: AttentionShape) -> PagedAttention:
        attention = loaded.make_attention(shape)
        plan = attention.plan

        def note(batch: PagedBatch) -> AttentionPlan:
            steps.append(list(batch.query_lens))
            return plan(batch)

        attention.plan = note  # type: ignore[method-assign]
        return attention

    shape = AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, num_layers=3, dtype=torch.float32, device=CPU
    )
    load_attention(replace(loaded, make_attention=noting), shape)
    assert steps == [[1], [2], [1, 2]]


class TestBeside:
    def test_it_runs_beside_its_maker(self) -> None:
        begun, may_end = threading.Event(), threading.Event()

        def run() -> str:
            begun.set()
            may_end.wait()
            return threading.current_thread().name

        beside = Beside("a-phase", run)
        begun.wait()
        may_end.set()
        assert beside.wait() == "a-phase"

    def test_its_error_is_the_starts(self) -> None:
        def broken() -> None:
            raise ValueError("no kernel for this shape")

        with pytest.raises(ValueError, match="no kernel for this shape"):
            Beside("a-phase", broken).wait()


def test_the_clock_tells_each_phase_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        clock = StartClock()
        with clock.phase("weights"):
            time.sleep(0.12)
    took = [record.getMessage().removeprefix("start: ").split(" took ") for record in caplog.records]
    assert [name for name, _ in took] == ["imports", "weights"]
    assert float(took[1][1].removesuffix(" s")) >= 0.12
    assert re.fullmatch(r"\d+\.\d s: imports \d+\.\d, weights \d+\.\d", str(clock))
    assert clock.total_seconds >= 0.12


def test_a_process_is_not_older_than_the_time_since_before_its_start() -> None:
    program = f"from {process_age_seconds.__module__} import process_age_seconds; print(process_age_seconds())"
    began_at = time.monotonic()
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    tick_seconds = 1 / os.sysconf("SC_CLK_TCK")
    assert 0.0 < float(shown) <= time.monotonic() - began_at + tick_seconds


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        ("127.0.0.1", "cpu", {"UCX_NET_DEVICES": "lo", "UCX_MEM_EVENTS": "n"}),
        ("::1", "cuda:1", {"UCX_NET_DEVICES": "lo"}),
        ("10.0.0.7", "cpu", {}),
    ],
)
def test_ucx_stays_on_this_machine_with_a_loopback_address(
    host: str, device: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"UCX_TLS": "tcp"}
    monkeypatch.setattr(os, "environ", given)
    set_up_ucx(host, torch.device(device))
    assert given == {"UCX_TLS": "tcp"} | expected
    given["UCX_MEM_EVENTS"] = "y"
    set_up_ucx(host, torch.device(device))
    assert given["UCX_MEM_EVENTS"] == "y", "an operator's own"
