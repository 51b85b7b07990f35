"""``splitserve models``, and what the doctor says of a model's cache."""

import json
from pathlib import Path

import pytest
import transformers

from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.doctor.model import look_at_cache
from splitserve.protocol.config import EngineConfig


def test_the_list_is_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["Qwen3ForCausalLM"]["support"] == "native" and found["OPTForCausalLM"]["support"] == "transformers"
    assert found["MambaForCausalLM"]["note"] == "Recurrent state isn't supported yet."
    assert cli.main(["models", "--support", "refused"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Refused (") and "FalconForCausalLM" in shown and "Qwen3ForCausalLM" not in shown


def test_the_doctor_describes_a_models_cache(tmp_path: Path, tiny_qwen3: Path) -> None:
    config = transformers.GptOssConfig(num_hidden_layers=24)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    engine = EngineConfig(model=str(tmp_path), dtype="bfloat16", kv_memory_bytes=2 << 30, max_model_len=8192)
    text = look_at_cache(engine, has_gpu=False, available_bytes=0).text
    assert "Splitserve's own code; cache: full (12 layers), window of 128 (12 layers) in bfloat16" in text
    assert "24,576 bytes a token, 3.4 MiB a sequence for windows" in text and "sequences of 8,192" in text
    on_gpu = look_at_cache(EngineConfig(model=str(tmp_path)), has_gpu=True, available_bytes=0)
    assert "measured at the start" in on_gpu.text and not on_gpu.problems
    small = EngineConfig(model=str(tiny_qwen3), kv_memory_bytes=1 << 20, max_model_len=4096)
    [problem] = look_at_cache(small, has_gpu=False, available_bytes=0).problems
    assert problem.name == "kv_memory" and "fewer than --max-model-len 4096" in problem.text
