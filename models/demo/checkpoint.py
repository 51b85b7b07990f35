"""Demo checkpoints in Hugging Face format: true shapes, random weights, the same bytes for the same seed.

The weights are made so that greedy text wanders as a trained model's does: layer outputs are large against the
token's own embedding (or a tied model would repeat its input for ever), and the final norm spreads the logits, so that
near-ties are rare. Special tokens and ids beyond the tokenizer have small embeddings, hence improbable, but possible.
They are uniform numbers made of 16-bit integers, since those are the same on every machine.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from splitserve.common.errors import ConfigError
from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.latent.shape import LatentShape
from splitserve.models.config import DecoderSizes, Fp8Format, ModelConfig, RopeScaling, load_model_config
from splitserve.models.declared import declare
from splitserve.models.demo.tokenizer import LLAMA_TOKENS, QWEN_TOKENS, SpecialTokens, train_tokenizer
from splitserve.models.experts import ExpertsSpec
from splitserve.models.layers.weight import Role, Weight

DEFAULT_MAX_SHARD_BYTES = 5 * 1000**3
_MAX_TOKENIZER_SIZE = 2048
_EMBEDDING_STD = 0.05
_LAYER_GAIN = 1.5  # standard deviation of a matrix's output for a normalised input
_FINAL_NORM_STD = 4.0  # standard deviation of the logits: about what trained models have
_BIAS_RANGE = 0.5  # of a projection's bias, to either side
_IMPROBABLE = 0.05  # factor on the embeddings of tokens that should rarely be drawn
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DemoShape(DecoderSizes):
    """The shape of a demo checkpoint."""

    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    architecture: str | None = None  # None: either family may have this shape
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    experts: ExpertsSpec | None = None
    fp8: Fp8Format | None = None
    latent: LatentShape | None = None
    activation: str = "silu"
    mlp_gate: bool = True
    mlp_bias: bool = False


_LLAMA_3_2_ROPE = RopeScaling(32.0, 1.0, 4.0, 8192)
_LLAMA_3_1_ROPE = RopeScaling(8.0, 1.0, 4.0, 8192)
_TINY_ROPE = RopeScaling(8.0, 1.0, 4.0, 256)

SHAPES = {
    "tiny": DemoShape(128, 4, 8, 4, 32, 384, 2048, 4096, 10000.0, True, "float32"),
    "small": DemoShape(512, 8, 8, 4, 64, 1536, 2048, 8192, 10000.0, True, "float32"),
    "tiny-experts": DemoShape(
        128,
        4,
        8,
        4,
        32,
        384,
        2048,
        4096,
        10000.0,
        True,
        "float32",
        architecture="qwen3",
        experts=ExpertsSpec(RouterSpec(8, 2, normalised=True), 96),
    ),
    "qwen3-0.6b": DemoShape(1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e6, True, "bfloat16", architecture="qwen3"),
    "qwen3-8b": DemoShape(4096, 36, 32, 8, 128, 12288, 151936, 40960, 1e6, False, "bfloat16", architecture="qwen3"),
    "qwen3-30b-a3b": DemoShape(
        2048,
        48,
        32,
        4,
        128,
        6144,
        151936,
        40960,
        1e6,
        False,
        "bfloat16",
        architecture="qwen3",
        experts=ExpertsSpec(RouterSpec(128, 8, normalised=True), 768),
    ),
    "llama-3.2-1b": DemoShape(
        2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, True, "bfloat16", "llama", _LLAMA_3_2_ROPE, 1e-5
    ),
    "llama-3.1-8b": DemoShape(
        4096, 32, 32, 8, 128, 14336, 128256, 131072, 5e5, False, "bfloat16", "llama", _LLAMA_3_1_ROPE, 1e-5
    ),
}


def write_demo_model(
    directory: str | Path,
    *,
    shape: str = "tiny",
    architecture: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Path:
    """Writes a checkpoint into ``directory`` (made if needed) and returns it. The default takes about 5 MB.

    ``shape`` is one of :data:`SHAPES`; ``architecture`` "qwen3" or "llama" (None: the shape's own, else qwen3);
    ``dtype`` "float32", "bfloat16" or "auto" (the shape's own). Above ``max_shard_bytes``: shards and an index.
    Each file is replaced as a whole, so a server that has the old one mapped isn't disturbed.
    Raises :class:`ConfigError` for a choice that doesn't exist.
    """
    sizes = _resolve(shape, architecture, dtype)
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    target = Path(directory)
    num_probable = _write_without_weights(target, sizes, seed)
    _write_weights(target, load_model_config(target), num_probable, seed, max_shard_bytes)
    return target


def write_demo_config(directory: str | Path, *, shape: str, dtype: str = "auto") -> Path:
    """Write a checkpoint without weights, enough for ``--load-format dummy``. Returns ``directory``.

    See :func:`write_demo_model`.
    """
    target = Path(directory)
    _write_without_weights(target, _resolve(shape, None, dtype), seed=0)
    return target


def _write_without_weights(target: Path, sizes: DemoShape, seed: int) -> int:
    """Write the tokenizer and the config files. Returns the number of tokens that shall be probable."""
    target.mkdir(parents=True, exist_ok=True)
    special = QWEN_TOKENS if sizes.architecture == "qwen3" else LLAMA_TOKENS
    tokenizer = train_tokenizer(min(sizes.vocab_size, _MAX_TOKENIZER_SIZE), special, seed)
    _write_tokenizer(target, tokenizer, special, sizes)
    _write_configs(target, tokenizer, special, sizes)
    return tokenizer.get_vocab_size() - len(special.tokens)


def shape_config(shape: str) -> ModelConfig:
    """Return the config that :func:`load_model_config` reads from a demo checkpoint of ``shape``; writes none."""
    sizes = _resolve(shape, None, "auto")
    assert sizes.architecture is not None
    return ModelConfig(
        architecture=sizes.architecture if sizes.experts is None else "qwen3_moe",
        experts=sizes.experts,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_theta=sizes.rope_theta,
        rope_scaling=sizes.rope_scaling,
        tie_word_embeddings=sizes.tie_word_embeddings,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=sizes.dtype,
    )


def _resolve(shape: str, architecture: str | None, dtype: str) -> DemoShape:
    if shape not in SHAPES:
        raise ConfigError(f"shape is {shape!r}; choose one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape]
    architecture = architecture or sizes.architecture or "qwen3"
    if architecture not in ("qwen3", "llama"):
        raise ConfigError(f"architecture is {architecture!r}; choose qwen3 or llama")
    if sizes.architecture not in (None, architecture):
        raise ConfigError(f"shape {shape} is of the {sizes.architecture} family, not {architecture}")
    dtype = sizes.dtype if dtype == "auto" else dtype
    if dtype not in _TORCH_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of auto, {', '.join(_TORCH_DTYPES)}")
    return replace(sizes, architecture=architecture, dtype=dtype)


def _write_tokenizer(target: Path, tokenizer: Tokenizer, special: SpecialTokens, sizes: DemoShape) -> None:
    _replace(target / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "bos_token": special.bos,
        "eos_token": special.eos,
        "pad_token": special.pad,
        "chat_template": special.chat_template,
    }
    _replace_json(target / "tokenizer_config.json", content)


def _write_configs(target: Path, tokenizer: Tokenizer, special: SpecialTokens, sizes: DemoShape) -> None:
    eos_ids = [tokenizer.token_to_id(special.eos), tokenizer.token_to_id(special.pad)]
    bos_id = tokenizer.token_to_id(special.bos) if special.bos else None
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    scaling = sizes.rope_scaling or (_TINY_ROPE if sizes.architecture == "llama" else None)
    if scaling is not None:
        names = RopeScaling.__dataclass_fields__
        rope |= {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in names}
    content: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if sizes.architecture == "qwen3" else "LlamaForCausalLM"],
        "model_type": sizes.architecture,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids[0],
        "use_cache": True,
        "dtype": sizes.dtype,
    }
    if sizes.experts is not None:
        content |= _expert_fields(sizes.experts)
    _replace_json(target / "config.json", content)
    generation = {"bos_token_id": bos_id, "eos_token_id": eos_ids, "pad_token_id": eos_ids[1], "do_sample": False}
    _replace_json(target / "generation_config.json", generation)


def _expert_fields(experts: ExpertsSpec) -> dict[str, Any]:
    """Return the fields of Qwen3's config.json that describe experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts.router.num_experts,
        "num_experts_per_tok": experts.router.top_k,
        "norm_topk_prob": experts.router.normalised,
        "moe_intermediate_size": experts.inner_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_weights(target: Path, config: ModelConfig, num_probable: int, seed: int, max_shard_bytes: int) -> None:
    weights = list(_in_file_order(config))
    dtype = _TORCH_DTYPES[config.dtype]
    shards = list(_shards(weights, dtype, max_shard_bytes))
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = target / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    for file, shard in zip(names, shards, strict=True):
        tensors = {weight.name: demo_tensor(weight, num_probable, seed).to(dtype) for weight in shard}
        partial = target / f".{file}.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        shutil.copymode(target / "config.json", partial)  # safetensors writes for its user alone, whatever the umask
        os.replace(partial, target / file)
    for stale in set(target.glob("*.safetensors")) - {target / name for name in names}:
        stale.unlink()
    if len(shards) > 1:
        total = sum(math.prod(weight.shape) for weight in weights) * dtype.itemsize
        weight_map = {weight.name: file for file, shard in zip(names, shards, strict=True) for weight in shard}
        _replace_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _in_file_order(config: ModelConfig) -> Iterator[Weight]:
    """Yield the weights in the order of demo files, which never changes: a layer's norms of heads are its last."""
    decoder = declare(config)
    yield decoder.embedding_weight
    for part in decoder.parts():
        yield from sorted(part.weights(), key=lambda weight: weight.role is Role.HEAD_NORM)
    if not decoder.is_tied:
        yield decoder.head_weight


def _shards(weights: Sequence[Weight], dtype: torch.dtype, max_shard_bytes: int) -> Iterator[list[Weight]]:
    """Yield the weights of each shard, in order; a tensor larger than the bound has a shard of its own."""
    shard: list[Weight] = []
    shard_bytes = 0
    for weight in weights:
        tensor_bytes = math.prod(weight.shape) * dtype.itemsize
        if shard and shard_bytes + tensor_bytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(weight)
        shard_bytes += tensor_bytes
    yield shard


def demo_tensor(weight: Weight, num_probable: int, seed: int) -> Tensor:
    """Return the float32 tensor: a function of seed, name, shape and role alone."""
    stream = np.random.Philox(key=[seed, zlib.crc32(weight.name.encode())])
    count = math.prod(weight.shape)
    words = stream.random_raw((count + 3) // 4).view(np.int16)[:count]
    uniform = torch.from_numpy(words).to(torch.float32).add_(0.5).mul_(1.0 / 32768).view(weight.shape)
    match weight.role:
        case Role.NORM | Role.HEAD_NORM:
            return uniform.mul_(0.1).add_(1.0)
        case Role.FINAL_NORM:
            return uniform.mul_(0.1).add_(1.0).mul_(_FINAL_NORM_STD / (_EMBEDDING_STD * math.sqrt(count)))
        case Role.EMBEDDING | Role.HEAD:
            uniform.mul_(_EMBEDDING_STD * math.sqrt(3.0))
            uniform[num_probable:] *= _IMPROBABLE
            return uniform
        case Role.BIAS | Role.CORRECTION_BIAS | Role.SINK:
            return uniform.mul_(_BIAS_RANGE)
        case Role.PROJECTION | Role.EXPERT | Role.ROUTER:
            return uniform.mul_(_LAYER_GAIN * math.sqrt(3.0 / weight.shape[1]))
        case Role.EXPERT_BLOCKS | Role.EXPERT_SCALES:
            raise ValueError(f"{weight.name}: demo models have no weights in MXFP4")


def _replace_json(path: Path, content: dict[str, Any]) -> None:
    _replace(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
