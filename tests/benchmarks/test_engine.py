"""The engine benches run end to end on tiny models and report what they compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_runner import LaunchingCpuRunner
from splitserve.benchmarks.engine import ceilings, engine
from splitserve.benchmarks.engine.engine_vs_transformers import main
from splitserve.benchmarks.engine.sampling_modes import NAMES
from splitserve.benchmarks.engine.step_cases import with_layers
from splitserve.benchmarks.engine.step_memory import Sequences, StepMemory
from splitserve.models.demo.published import PUBLISHED, config_of, named_config

pytestmark = pytest.mark.usefixtures("one_thread")


def test_report(tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    threads = torch.get_num_threads()
    arguments = ["--prefill-tokens", "33", "--context", "17", "--steps", "3", "--rounds", "2", "--batch", "1", "3"]
    assert main(["--model", str(tiny_qwen3), "--json", str(report), *arguments]) == 0
    assert torch.get_num_threads() == threads
    content = json.loads(report.read_text())
    assert content["sequences_identical"] == [5, 5]
    cases = [(row["case"], row["samples"]) for row in content["results"]]
    assert cases == [
        ("prefill, batch 1, 33 tokens", 2),
        ("decode, batch 1, 17 tokens", 6),
        ("decode, batch 3, 17 tokens", 6),
    ]
    assert all(row["ours_ms"] > 0 and row["ratio"] > 0 for row in content["results"])
    assert "ratio" in capsys.readouterr().out


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
SMALL = {
    "gpt-oss-20b": {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"],
                    "sliding_window": 24},
    "deepseek-v2-lite": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": None,
                         "num_key_value_heads": 4},
    "gemma-3-27b": {"sliding_window": 24, "sliding_window_pattern": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_steps_of_a_gpu_with_a_cpu_in_its_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to draw takes its turn in each round; floors count the experts that were hit. A dense model's steps are
    compared with their products as well."""
    runners: list[LaunchingCpuRunner] = []

    def make_runner(*args: Any, **options: Any) -> LaunchingCpuRunner:
        runners.append(LaunchingCpuRunner(*args, **options))
        return runners[-1]

    monkeypatch.setattr(engine, "CudaRunner", make_runner)
    for module in (engine, ceilings):
        monkeypatch.setattr(module, "bench_device", lambda: torch.device("cpu"))
        monkeypatch.setattr(module, "synchronize", lambda: None)
    monkeypatch.setattr(engine, "free_bytes", lambda: 1 << 28)
    monkeypatch.setattr(ceilings, "_PRODUCT_SIZE", 256)
    monkeypatch.setitem(engine._DTYPES, "bfloat16", torch.float32)
    config = config_of({**PUBLISHED[name], **SIZES, **SMALL[name], "dtype": "bfloat16"})
    options = ["--batch", "3", "--context", "40", "--case", "1x130", "--prefill", "33", "--steps", "3", "--repeat", "2"]
    options += ["--mixed", "2x20"]
    arguments = engine.parse([*options, "--block-size", "16", "--sampling", *NAMES])
    found = engine.measure_shape(config, name, engine.Ceilings(1e9, 2e9, 1e10), arguments)
    assert "errors" not in found
    cases = [(each["batch"], each["context"], each["sampling"]) for each in found["decode"]]
    assert cases == [(batch, context, mode) for batch, context in ((3, 40), (1, 130)) for mode in NAMES]
    for each in found["decode"]:
        assert each["least_ms"] <= each["step_ms"] <= each["most_ms"]
        if config.experts is None:
            assert each["experts_hit"] is None and each["parts_ms"] > 0 and each["parts_share"] > 0
        else:
            assert 1 <= each["experts_hit"] <= 8 and each["parts_ms"] == 0
        assert each["floor_ms"] == pytest.approx(2 * each["read_floor_ms"]) and each["floor_ms"] > 0
    assert [(each["batch"], each["context"], each["prompt_tokens"]) for each in found["mixed"]] == [(2, 40, 20)]
    assert all(0 < each["least_ms"] <= each["step_ms"] <= each["most_ms"] for each in found["mixed"])
    lengths = [[len(chunk.token_ids) for chunk in plan.chunks] for plan in runners[0].plans]
    assert lengths.count([1, 1, 20]) == 2 * (4 + 3)
    assert [each["tokens"] for each in found["prefill"]] == [33]
    assert all(each["beside_share"] > 0 for each in found["prefill"])
    launched = [plan for plan in runners[0].plans if len(plan.chunks) == 3]
    per_run = 4 + 3  # steps to warm up, and timed ones
    assert len(launched) >= 2 * len(NAMES) * per_run


def test_only_the_first_layers() -> None:
    config = named_config("gpt-oss-20b")  # every other layer has a window
    short = with_layers(config, 3)
    assert (short.num_layers, short.sliding_layers) == (3, (0, 2))
    assert with_layers(config, None) == with_layers(config, config.num_layers) == config


def test_tables_of_sequences_are_apart_and_windows_move_on() -> None:
    config = config_of({**PUBLISHED["gpt-oss-20b"], **SIZES, **SMALL["gpt-oss-20b"], "dtype": "bfloat16"})
    case = Sequences(3, 100, 140)
    cpu = torch.device("cpu")
    memory = StepMemory(config, [case], block_size=16, dtype=torch.float32, device=cpu, most_bytes=1 << 28)
    tables = memory.tables(case)
    for position in range(case.start, case.length):
        found = [each.upto(position, position + 1) for each in tables]
        for group in (0, 1):
            blocks = [block for own, others in found for block in (own if group == 0 else others[0].block_ids)]
            assert len(blocks) == len(set(blocks)) and max(blocks) < memory.num_blocks[group]
        for own, (other,) in found:
            assert len(own) == position // 16 + 1
            assert other.first_number == (position - 23) // 16
            assert other.first_number + len(other.block_ids) == position // 16 + 1
    assert not memory.has(Sequences(4, 100, 140)) and memory.has(Sequences(1, 0, 30))
