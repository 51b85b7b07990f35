"""Bytes of published models' caches, from their sizes alone: per token, and per sequence for windows."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from splitserve.models.cache_groups import cache_layout
from splitserve.models.catalogue import architectures
from splitserve.models.config import load_model_config
from splitserve.models.families.registry import FAMILIES, WITH_TEXT
from splitserve.models.kv_plan import longest_sequences, plan_kv_memory, sequence_bytes, token_bytes
from splitserve.protocol.config import EngineConfig

KIB, MIB = 1 << 10, 1 << 20


def sizes(layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 128, **more: Any) -> dict[str, Any]:
    """Return fields of a config that count here."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head_dim,
        **more,
    }


PUBLISHED = [  # class, sizes, bytes per token in bfloat16, MiB of windows per sequence in blocks of 16
    ("Llama", sizes(80, 64, 8, 8192), 327_680, 0.0),
    ("Mixtral", sizes(32, 32, 8, 4096, sliding_window=None), 131_072, 0.0),
    ("Mixtral", sizes(56, 48, 8, 6144, sliding_window=None), 229_376, 0.0),
    ("Qwen3Moe", sizes(48, 32, 4, 2048), 98_304, 0.0),
    ("Qwen3Moe", sizes(94, 64, 4, 4096), 192_512, 0.0),
    ("Glm4Moe", sizes(92, 96, 8, 5120), 376_832, 0.0),
    ("Glm4Moe", sizes(46, 96, 8, 4096), 188_416, 0.0),
    ("MiniMaxM2", sizes(62, 48, 8, 3072), 253_952, 0.0),
    ("GptOss", sizes(24, 64, 8, 2880, 64), 24_576, 3.375),
    ("GptOss", sizes(36, 64, 8, 2880, 64), 36_864, 5.0625),
    ("Gemma2", sizes(46, 32, 16, 4608), 188_416, 739.0),
    ("Gemma3", sizes(62, 32, 16, 5376, sliding_window=1024), 81_920, 422.0),
]


@pytest.mark.parametrize(("kind", "fields", "per_token", "mib"), PUBLISHED)
def test_bytes_of_published_models(
    tmp_path: Path, kind: str, fields: dict[str, Any], per_token: int, mib: float
) -> None:
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**fields)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    cache = cache_layout(load_model_config(tmp_path), 16, "bfloat16")
    assert token_bytes(cache) == per_token
    assert sequence_bytes(cache) / MIB == pytest.approx(mib, rel=0.01)
    assert 2 * token_bytes(cache) == token_bytes(cache_layout(load_model_config(tmp_path), 16, "float32"))


def test_sequences_that_fit_are_those_of_the_smallest_group(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**sizes(24, 64, 8, 2880, 64))
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    cache = cache_layout(load_model_config(tmp_path), 64, "bfloat16")
    engine = EngineConfig(model="m", kv_memory_bytes=1 << 30, max_model_len=8192, max_num_seqs=4).on("cuda")
    plan = plan_kv_memory(engine, cache, max_position_embeddings=131_072, available_bytes=0)
    used = sum(count * cache.blocks(number).block_bytes for number, count in enumerate(plan.num_blocks))
    assert used <= 1 << 30
    assert longest_sequences(cache, plan) == min(
        plan.num_blocks[0] // (8192 // 64), plan.num_blocks[1] // 3  # 127 tokens before one, in blocks of 64
    )  # fmt: skip


def test_the_list_of_architectures_has_each_family_once() -> None:
    known = list(architectures())
    names = [each.name for each in known]
    assert len(names) == len(set(names)), "an architecture is listed twice"
    assert {each.name for each in known if each.support == "native"} == {*FAMILIES, *WITH_TEXT}
    assert all(each.note.endswith(".") for each in known if each.support != "transformers")
    assert sum(each.support == "transformers" for each in known) >= 40
