"""Every family with Triton's products, under its interpreter: a decode step of one row has a kernel of its own."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from family_runs import BLOCK_SIZE, CPU, NUM_BLOCKS, greedy
from serving import transformers_greedy
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.kernels.triton import operations as triton_ops
from splitserve.kernels.triton.linear import TritonLinear
from splitserve.kernels.triton.norms import TritonNorm
from splitserve.models.config import load_model_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from transformers_models import NATIVE, write_transformers_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="under Triton's interpreter; test_families_gpu is for GPUs"),
]

PROMPT = [77]
NUM_NEW_TOKENS = 2
QUICK = ("DeepseekV3ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Starcoder2ForCausalLM")
"""Norms of all kinds: of latents, with an offset, after products alone, centred. The others take a minute."""


@pytest.mark.parametrize(
    "architecture", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in NATIVE if n not in QUICK)]
)
def test_decode_steps_draw_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    write_transformers_model(tmp_path, architecture, vocab_size=128)
    (expected,) = transformers_greedy(tmp_path, [PROMPT], NUM_NEW_TOKENS)
    around = {"rms_norm": triton_ops.rms_norm, "silu_mul": triton_ops.silu_mul}
    plain = select_kernels(CPU, torch.float32, dict.fromkeys(OPERATIONS, "reference"))
    kernels = replace(
        plain,
        **around,
        gelu_mul=triton_ops.gelu_mul,
        pack_norm=TritonNorm,
        pack_linear=partial(TritonLinear, **around),
    )
    model = load_model(tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU, kernels=kernels)
    memory = torch.full((NUM_BLOCKS, *model.config.block_shape(BLOCK_SIZE)), torch.nan)
    assert expected.agrees(greedy(ModelRunner(model, memory), PROMPT, 64, NUM_NEW_TOKENS))
