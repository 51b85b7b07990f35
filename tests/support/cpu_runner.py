"""A runner on the CPU, and the reference that it is compared with. Not a test module."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from splitserve.models.config import load_model_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def make_runner(path: Path, num_blocks: int = 128, dtype: torch.dtype = torch.float32) -> ModelRunner:
    config = load_model_config(path)
    model = load_model(path, config, dtype=dtype, device=CPU)
    # NaN: whatever the runner reads without having written it shows.
    shape = (num_blocks, config.num_layers, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    return ModelRunner(model, torch.full(shape, math.nan, dtype=dtype))


@cache
def reference_model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
