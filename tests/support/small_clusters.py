"""Small clusters for end-to-end tests, and the requests that they get."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import PATIENT
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

BLOCK_SIZE = 16


MAX_TOKENS = 24


SHAPES: dict[str, dict[str, int]] = {
    "mixed": {"num_mixed": 1},
    "1P1D": {"num_prefill": 1, "num_decode": 1},
    "2P2D": {"num_prefill": 2, "num_decode": 2},
}


@contextmanager
def cluster(model: Path, shape: str, **engine: Any) -> Iterator[LocalCluster]:
    """A small cluster in float32 whose prompts take several chunks."""
    settings = {"kv_memory_bytes": 64 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 32, "tail_chunk_tokens": 16}
    config = EngineConfig(model=str(model), dtype="float32", block_size=BLOCK_SIZE, **{**settings, **engine})
    with LocalCluster(simple_spec(config, port=0, protocol=PATIENT, **SHAPES[shape]), log_level="warning") as running:
        yield running


def body(model: Path, prompt: list[int], **options: Any) -> dict[str, Any]:
    return {
        "model": model.name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "return_route": True, **options,
    }  # fmt: skip
