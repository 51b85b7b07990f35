"""Tensor-parallel ranks as real processes: the same tokens, and one end for all of them."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from forked_ranks import start_ranks
from splitserve.common.errors import CheckpointError
from splitserve.models.config import load_model_config
from splitserve.models.declared import shard_of
from splitserve.models.demo import checkpoint as demo
from splitserve.models.parallel.process_group import join_group, open_store
from splitserve.models.parallel.ranks import Alone, CollectiveError
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan
from splitserve.worker.ranks.others import RankError, Ranks
from splitserve.worker.ranks.runner import RankedRunner
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.served_model import load_served_model
from stopping import stop_process
from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def engine_of(model: Path, size: int, expert_parallel: str = "auto") -> EngineConfig:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        kv_memory_bytes=8 << 20,
        threads=1,
        tensor_parallel_size=size,
        expert_parallel=expert_parallel,
    )
    return engine.on("cpu")


class Team:
    """Rank 0 in this process, the others as children."""

    def __init__(self, model: Path, size: int, expert_parallel: str = "auto", *, as_programs: bool = False) -> None:
        self.failed = threading.Event()
        self.failure: RankError | None = None
        store, port = open_store(size)
        engine = engine_of(model, size, expert_parallel)
        started = [] if as_programs else start_ranks(size - 1)
        self.ranks = Ranks(Party("mixed-0", 1), Role.MIXED, engine, port, self._on_failure, started=started)
        try:
            self.group = join_group(store, shard_of(load_model_config(model), 0, size, expert_parallel), CPU)
            self.served = load_served_model(engine, CPU, self.group, lambda _stage, _detail: None)
            self.served.warm_up(StartClock())
            self.ranks.wait_until_ready()
        except Exception as error:
            explained = self.ranks.explain(error)
            self.ranks.close()
            raise explained from error
        self.runner = RankedRunner(self.served.runner, self.ranks)

    def _on_failure(self, error: RankError) -> None:
        self.failure = error
        self.failed.set()


@contextmanager
def team(model: Path, size: int, expert_parallel: str = "auto", *, as_programs: bool = False) -> Iterator[Team]:
    running = Team(model, size, expert_parallel, as_programs=as_programs)
    try:
        yield running
    finally:
        running.ranks.close()
        assert not any(psutil.pid_exists(pid) for pid in running.ranks.pids)


def tokens_of(runner: RankedRunner | ModelRunner, prompt: list[int], count: int, heat: float = 0.0) -> list[int]:
    """The prompt in two chunks, then token by token."""
    tokens, half = list(prompt), len(prompt) // 2
    blocks = list(range(8))
    runner.run(StepPlan([ScheduledChunk(tokens[:half], 0, blocks, None)]))
    start = half
    for _ in range(count):
        spec = SampleSpec(heat, 0, 1.0, 7, 0, len(tokens))
        drawn = runner.run(StepPlan([ScheduledChunk(tokens[start:], start, blocks, spec)])).token_ids[0]
        assert drawn is not None
        start = len(tokens)
        tokens.append(drawn)
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("architecture", "size"), [("qwen3", 2), ("llama", 2), pytest.param("llama", 4, marks=pytest.mark.slow)]
)
def test_ranks_draw_the_tokens_of_one(architecture: str, size: int, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    alone = load_served_model(engine_of(model, 1), CPU, Alone(), lambda _stage, _detail: None)
    prompt = list(range(300, 350))
    with team(model, size) as running:
        assert running.served.memory.layout.kv_heads_per_rank == 4 // size
        assert running.served.memory.num_blocks == alone.memory.num_blocks
        for heat in (0.0, 1.0):
            assert tokens_of(running.runner, prompt, 5, heat) == tokens_of(alone.runner, prompt, 5, heat)


def test_more_ranks_than_key_value_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = demo.DemoShape(128, 2, 8, 2, 32, 384, 1003, 4096, 1e4, tie_word_embeddings=False, dtype="float32")
    monkeypatch.setitem(demo.SHAPES, "two-heads", shape)
    model = demo.write_demo_model(tmp_path / "m", shape="two-heads")
    alone = load_served_model(engine_of(model, 1), CPU, Alone(), lambda _stage, _detail: None)
    with team(model, 4) as running:
        assert running.served.memory.layout.kv_heads_per_rank == 1
        assert tokens_of(running.runner, [5, 6, 7, 8], 8) == tokens_of(alone.runner, [5, 6, 7, 8], 8)


def test_ranks_that_are_still_starting_end_at_once_and_silently(
    tiny_qwen3: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, port = open_store(3)
    ranks = Ranks(Party("mixed-0", 1), Role.MIXED, engine_of(tiny_qwen3, 3), port, lambda _error: None)
    ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids)
    assert not capfd.readouterr().err


def test_a_killed_rank_is_named_while_idle_and_in_a_step(tiny_qwen3: Path) -> None:
    with team(tiny_qwen3, 2, as_programs=True) as running:
        os.kill(running.ranks.pids[0], signal.SIGKILL)
        assert running.failed.wait(PATIENCE_SECONDS)
        assert str(running.failure) == "mixed-0 rank 1 was ended by SIGKILL"
        with pytest.raises(RankError, match="out of step"):
            running.ranks.check()
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
            tokens_of(running.runner, [5, 6], 1)


def test_the_first_error_is_shown_not_what_it_led_to(tiny_qwen3: Path) -> None:
    """One of four ranks is killed within a step: the three others lose their connections, and report that first."""
    with team(tiny_qwen3, 4) as running:
        stop_process(running.ranks.pids[1])
        threading.Timer(0.3, os.kill, (running.ranks.pids[1], signal.SIGKILL)).start()
        with pytest.raises(RankError, match="rank 2 was ended by SIGKILL") as caught:
            tokens_of(running.runner, [5, 6], 1)
        assert isinstance(caught.value.__cause__, CollectiveError)
        assert running.failed.wait(PATIENCE_SECONDS)
        assert str(running.failure) == "mixed-0 rank 2 was ended by SIGKILL"


def test_an_error_in_one_ranks_step_is_shown_in_its_own_words(tiny_qwen3: Path) -> None:
    with team(tiny_qwen3, 2) as running:
        assert tokens_of(running.runner, [5, 6], 1)
        pid = running.ranks.pids[0]
        size = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))  # no more memory for this rank
        chunk = ScheduledChunk(list(range(1000)) * 2, 0, list(range(125)), SampleSpec(0.0, 0, 1.0, 0, 0, 2000))
        with pytest.raises(RankError, match=r"rank 1: .*(allocate|[Mm]emory)"):
            running.runner.run(StepPlan([chunk]))
        assert running.failed.wait(PATIENCE_SECONDS)
        assert "rank 1" in str(running.failure)
        assert "memory" in str(running.failure)


def test_what_ranks_cannot_load_is_said_once(tiny_qwen3: Path, tmp_path: Path) -> None:
    for file in tiny_qwen3.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        Team(tmp_path, 2)


def test_a_large_plan_passes(tiny_qwen3: Path) -> None:
    """More than the pipe between the processes holds."""
    spec = SampleSpec(0.0, 0, 1.0, 0, 0, 1)
    chunks = [ScheduledChunk([5], 0, [block] * 2000, spec) for block in range(64)]
    with team(tiny_qwen3, 2) as running:
        first = running.runner.run(StepPlan(chunks)).token_ids
        assert first == [first[0]] * 64


@pytest.mark.parametrize("expert_parallel", ["off", "on"])
def test_ranks_share_experts(tmp_path: Path, expert_parallel: str) -> None:
    """Each rank has a part of every expert, or some of the experts: the tokens are those of one rank."""
    model = demo.write_demo_model(tmp_path, shape="tiny-experts")
    engine = engine_of(model, 1)
    alone = load_served_model(engine, CPU, Alone(), lambda _stage, _detail: None).runner
    prompt = [3, 1, 4, 1, 5]
    expected = tokens_of(alone, prompt, 12)
    with team(model, 2, expert_parallel) as running:
        assert running.group.shard.has_whole_experts == (expert_parallel == "on")
        assert tokens_of(running.runner, prompt, 12) == expected
