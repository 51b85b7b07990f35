"""Launches of every Triton kernel of ours, compiled for a GPU of compute capability 9.0 on a machine without one.

    python tests/support/kernel_launches.py [--last-stage ttir] [--whole]

Small models of all kinds run steps through the real launchers (:mod:`compiled_kernels`), then come the kernels beside
the model. ``--whole``: also published models at their true widths, and every launch that is shipped tuned. Prints JSON:
the kernels with their numbers of variants, and failures. Exit status: 1 with failures.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from compiled_kernels import compiling
from splitserve.kernels import registry
from splitserve.kernels.api import AttentionShape, Kernels
from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.sampling import SamplingBatch
from splitserve.kernels.triton import all_gather, all_reduce, operations
from splitserve.kernels.triton.gather import gather_tokens
from splitserve.kernels.triton.peer_memory import PeerMemory
from splitserve.kernels.triton.row_copy import RowCopier, Rows
from splitserve.kernels.tuning import linear_launch
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.linear_launch import Variant
from splitserve.kernels.tuning.linear_tunable import LinearCase
from splitserve.kernels.tuning.tunables import OPERATIONS, TuneTarget, load_tunable
from splitserve.models.config import ModelConfig
from splitserve.models.demo import published
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights import loader
from splitserve.protocol.step import ScheduledChunk

CPU = torch.device("cpu")
BLOCK_SIZE = 64
FP8 = torch.float8_e4m3fn
_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}
# Sequences, their tokens, and where these begin: products and experts have other tiles for more rows
_STEPS = ((1, 1, 200), (8, 1, 200), (64, 1, 200), (100, 1, 200), (400, 1, 200), (1, 40, 0), (1, 40, 1900))
_FP8_ROWS = {"quant_method": "fp8", "fmt": "e4m3"}
_DENSE = {"architectures": ["LlamaForCausalLM"]}
_GEMMA_2 = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 256, "query_pre_attn_scalar": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": None,
           "num_key_value_heads": 8}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]


def small_models() -> dict[str, Mapping[str, Any]]:
    """Return the fields of config.json of a small model of each kind."""
    known = {
        name: {field: value for field, value in fields.items() if field not in _SIZES}
        for name, fields in published.PUBLISHED.items()
    }
    return {
        "dense": _DENSE,
        "dense-fp8": {**_DENSE, "quantization_config": _FP8_ROWS},
        "soft caps": _GEMMA_2,
        "fp8 experts": {**known["qwen3-30b-a3b-fp8"], **_EXPERTS},
        "experts": {**known["qwen3-30b-a3b-fp8"], **_EXPERTS, "quantization_config": None},
        "mxfp4": {**known["gpt-oss-20b"], "num_local_experts": 8, "layer_types": _KINDS},
        "latent": {**known["deepseek-v2-lite"], **_LATENT},
    }


def published_models() -> Iterator[tuple[str, ModelConfig]]:
    """Yield published models with their true widths, and few layers of each kind."""
    for name in ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", *published.PUBLISHED):
        config = published.named_config(name)
        layers = 6 if config.window else 2
        yield (
            name,
            dataclasses.replace(
                config,
                num_layers=layers,
                sliding_layers=tuple(index for index in config.sliding_layers if index < layers),
            ),
        )


def triton_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels:
    """Return the Triton backend of each operation."""
    overrides = dict.fromkeys(registry.OPERATIONS, "triton")
    return registry.select_kernels(CPU, dtype, overrides, config.head_dim, has_sinks=config.sinks)


def run_steps(config: ModelConfig, dtype: torch.dtype, *, kv_dtype: torch.dtype | None = None) -> None:
    """Launch steps of one, of few and of more rows, of decodes and of prompts."""
    kernels = triton_kernels(config, dtype)
    model = loader.load_model("", config, dtype=dtype, device=CPU, load_format="dummy", kernels=kernels)
    memory = torch.empty((64, *config.block_shape(BLOCK_SIZE)), dtype=kv_dtype or dtype)
    runner = ModelRunner(model, memory)
    for count, query_len, start in _STEPS:
        table = list(range((start + query_len) // BLOCK_SIZE + 1))
        spec = mock.sentinel.drawn
        runner.logits([ScheduledChunk([1] * query_len, start, table, spec) for _ in range(count)])


def unused_keys(config: ModelConfig, dtype: torch.dtype) -> list[str]:
    """Run steps, and return the keys that the tuner has for the model but that no launch looks up."""
    looked_up: set[tuple[str, str]] = set()

    def config_for(operation: str, shape: str, _rows: int) -> None:
        looked_up.add((operation, shape))

    tuning.forget()  # what an earlier model has looked up
    with mock.patch.object(tuning, "config_for", config_for):
        run_steps(config, dtype)
    tuning.forget()
    target = TuneTarget(config, dtype, CPU, BLOCK_SIZE)
    tuned = [(each, key) for each in OPERATIONS for key in load_tunable(each).shape_keys(target)]
    return [f"{operation} {key}" for operation, key in tuned if (operation, key) not in looked_up]


def other_kernels(dtype: torch.dtype) -> None:
    """Launch what a model's steps don't: draws, copies of KV, sums and gathers of ranks, copies of rows."""
    kernels = triton_kernels(published.named_config("tiny"), dtype)
    shape = AttentionShape(4, 2, 64, 16, 2, dtype, CPU)
    table, rotations = torch.empty((100, 512), dtype=dtype), torch.empty((50, 2, 64), dtype=dtype)
    kernels.begin_step(
        torch.zeros((5, 3), dtype=torch.int64), torch.zeros(3, dtype=torch.int64), table, rotations, [shape, shape]
    )
    kernels.route(torch.empty((3, 8), dtype=dtype), None, RouterSpec(8, 2, normalised=True))  # of many rows
    logits = torch.empty((3, 5000), dtype=dtype)
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 50, 1.0), (0.8, 0, 0.9), (0.8, 50, 0.9)):
        kernels.sample(logits, SamplingBatch([temperature] * 3, [top_k] * 3, [top_p] * 3, range(3), [0] * 3, [1] * 3))
    for num_top in (0, 5):
        kernels.score_tokens(logits, torch.arange(3), num_top)
    kernels.mask_logits(logits.float(), torch.arange(2), torch.zeros((2, 157), dtype=torch.int32))
    occurrences, numbers = torch.zeros((3, 5000), dtype=torch.int32), torch.arange(2)
    kernels.penalise_logits(logits.float(), numbers, numbers, occurrences, torch.ones((2, 3)))
    kv_cache = torch.empty((8, 2, 2, 2, 16, 64), dtype=dtype)
    blocks, staged = torch.arange(3), torch.empty((3, 2, 1, 2, 16, 64), dtype=dtype)
    kernels.gather_kv(kv_cache, blocks, 1, staged)
    kernels.scatter_kv(staged, blocks, 1, kv_cache)
    gather_tokens(kv_cache[:, 0], torch.zeros((3, 4), dtype=torch.int32), 40)
    residual, norm = torch.empty((3, 512), dtype=dtype), torch.empty(512, dtype=dtype)
    buffers, capacity = torch.zeros(2, dtype=torch.int64), 1 << 16
    memory = PeerMemory(0, 2, capacity, buffers, torch.zeros((2, 128), dtype=torch.int32))
    for parts in (torch.empty((1, 3, 512), dtype=dtype), torch.empty((4, 3, 512))):
        for add in (all_reduce.one_shot_add, all_reduce.flagless_add, all_reduce.two_shot_add):
            add(memory, residual, parts)
            add(memory, residual, parts, norm=norm, eps=1e-5)
    for bias in (None, norm):
        operations.add_parts(residual, torch.empty((4, 3, 512)), norm, 1e-5, bias)
    all_gather.gather_columns(memory, torch.zeros(capacity, dtype=torch.uint8), residual)
    copier = RowCopier(None, Rows(4, 32768, 65536, 32768), 16)
    copier.start([0], [0])


def tuned_launches() -> None:
    """Launch every tuned entry of the shipped files whose shape a published model has."""
    for path in sorted(tuning.SHIPPED_DIRECTORY.glob("*.json")):
        known = tuning.TunedConfigs(path.stem, [tuning.SHIPPED_DIRECTORY])
        for name in published.NAMES:
            target = TuneTarget(published.named_config(name), torch.bfloat16, CPU, BLOCK_SIZE, is_for_compiling=True)
            for operation in ("linear_norm", "linear_gated", "linear_add", "experts", "attention_decode"):
                tunable = load_tunable(operation)
                for key in tunable.shape_keys(target):
                    for entry in known.entries(operation, key):
                        if (case := tunable.case(target, key, entry.max_rows)) is not None:
                            with tuning.forced(operation, entry.params):
                                case.calls()[0]()


def untuned_products() -> None:
    """Launch products that no file covers, with each of their tiles."""
    target = TuneTarget(published.named_config("tiny"), torch.bfloat16, CPU, BLOCK_SIZE, is_for_compiling=True)
    variants: tuple[Variant, ...] = ("norm", "gated", "add")
    for variant, rows, (columns, inputs) in product(
        variants, (1, 16, 32, 64), ((2048, 4608), (5120, 1536), (9216, 512))
    ):
        LinearCase(variant, target, columns, inputs, rows).calls()[0]()


def as_on_gpu(stack: ExitStack) -> None:
    """Choose what an H200 would, and leave random tensors unfilled."""
    with_triton = {
        operation: tuple(
            dataclasses.replace(each, why_not=lambda _target: None) if each.backend == "triton" else each
            for each in candidates
        )
        for operation, candidates in registry._CANDIDATES.items()
    }

    def unfilled(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
        return tensor

    def unfilled_product(left: Tensor, right: Tensor, **_options: Any) -> Tensor:
        return torch.empty((left.shape[0], right.shape[1]), dtype=torch.bfloat16)

    for patch in (
        mock.patch.object(registry, "_CANDIDATES", with_triton),
        mock.patch.object(Tensor, "normal_", unfilled),
        mock.patch.object(linear_launch, "multiprocessors", lambda: 132),
        mock.patch.object(loader, "fp8_unavailable_reason", lambda _device, _dtype: None),
        mock.patch("splitserve.kernels.experts.tunable.fp8_unavailable_reason", lambda _device, _dtype: None),
        mock.patch("splitserve.kernels.fp8.linear.fp8_unavailable_reason", lambda _device, _dtype: None),
        mock.patch("torch._scaled_mm", unfilled_product),
    ):
        stack.enter_context(patch)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--last-stage", default="ttir", choices=("ttir", "ttgir", "llir", "ptx"))
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        as_on_gpu(stack)
        found = stack.enter_context(compiling(options.last_stage))
        for name, fields in small_models().items():
            config = published.config_of({**_SIZES, **fields, "dtype": "bfloat16"})
            for key in unused_keys(config, torch.bfloat16):
                found.failures[f"{name}: {key}"] = "the tuner has this key, but no launch looks it up"
            if name in ("dense", "latent"):
                run_steps(config, torch.bfloat16, kv_dtype=FP8)
            if name == "dense":
                run_steps(config, torch.float32)
        other_kernels(torch.bfloat16)
        untuned_products()
        if options.whole:
            for name, config in published_models():
                print(name, file=sys.stderr, flush=True)
                run_steps(config, torch.bfloat16)
            tuned_launches()
    print(json.dumps({"kernels": found.kernels, "failures": found.failures}))
    if path := os.environ.get("SPLITSERVE_FIGURES"):
        Path(path).write_text(json.dumps({"kernels": len(found.kernels), "variants": sum(found.kernels.values())}))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
