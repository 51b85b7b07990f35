"""Which part of a model belongs to which rank: pure arithmetic over its configuration, without torch.

Attention is split by heads, the MLP by its intermediate dimension, the LM head by tokens. Queries, keys, values, gate
and up are split along their outputs; the projections after them along their inputs, so that the layer's output is the
sum of the ranks' products. With more ranks than key/value heads, neighbouring ranks hold the same head. Norms and the
embedding table are whole on every rank: a table lookup costs no time, and a split one would cost an all-reduce.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

from splitserve.errors import ConfigError
from splitserve.models.config import ModelConfig

_HEAD_ROWS_MULTIPLE = 16  # of the LM head's rows per rank: GEMMs like aligned rows of logits


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``; the default is the whole."""

    rank: int = 0
    size: int = 1

    def part_of(self, extent: int) -> range:
        """This rank's share of ``extent``, which divides evenly."""
        share = extent // self.size
        return range(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of the stored tensor ``name``; None stands for all rows or columns. A vector has rows only."""

    name: str
    rows: range | None = None
    columns: range | None = None


Parts: TypeAlias = tuple[Part, ...]


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Raises :class:`ConfigError` that says which sizes work, unless ``size`` ranks can share the model evenly."""
    if not _splits(config, size):
        sizes = [str(other) for other in range(1, config.num_heads + 1) if _splits(config, other)]
        raise ConfigError(
            f"{config.num_heads} attention heads, {config.num_kv_heads} key/value heads and an intermediate size of "
            f"{config.intermediate_size} can't be shared by {size} tensor-parallel ranks; {', '.join(sizes)} work"
        )


def _splits(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    fits_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
    return fits_kv_heads and config.num_heads % size == 0 and config.intermediate_size % size == 0


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of one rank's part: its heads and its share of the MLP; the vocabulary is the model's."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


def head_rows(vocab_size: int, size: int) -> int:
    """Rows of the LM head per rank: the last ranks' are padded."""
    if size == 1:
        return vocab_size
    rows = -(-vocab_size // size)
    return -(-rows // _HEAD_ROWS_MULTIPLE) * _HEAD_ROWS_MULTIPLE


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration must have, by its Hugging Face name."""
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_projection(name: str) -> bool:
    """Whether a stored tensor is a layer's matrix: what may be stored in FP8."""
    return name.endswith("_proj.weight")


def scale_shapes(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    """The scales that a checkpoint must have if it has the matrix ``name`` in FP8."""
    assert config.fp8 is not None
    if config.fp8.block is None:
        return {f"{name}_scale": ()}
    sizes = zip(expected_shapes(config)[name], config.fp8.block, strict=True)
    return {f"{name}_scale_inv": tuple(-(-size // block) for size, block in sizes)}


class WeightParts:
    """The parts of stored tensors that make up one rank's weights. Parts of one weight are stacked along their rows."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        self.embedding: Parts = (Part("model.embed_tokens.weight"),)
        self.final_norm: Parts = (Part("model.norm.weight"),)
        self.head: Parts = (self._head(),)

    def layer(self, index: int) -> dict[str, Parts]:
        """The weights of a layer, by the names of :class:`~splitserve.models.decoder.LayerWeights`; the norms of
        queries and keys by their own."""
        config, shard = self._config, self._shard
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        queries = shard.part_of(config.num_heads * config.head_dim)
        first = shard.rank * config.num_kv_heads // shard.size
        count = max(1, config.num_kv_heads // shard.size)
        keys = range(first * config.head_dim, (first + count) * config.head_dim)
        inner = shard.part_of(config.intermediate_size)
        norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        if config.qk_norm:
            norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        return {
            **{name: (Part(f"model.layers.{index}.{stored}.weight"),) for name, stored in norms.items()},
            "qkv": (
                Part(f"{attention}.q_proj.weight", queries),
                Part(f"{attention}.k_proj.weight", keys),
                Part(f"{attention}.v_proj.weight", keys),
            ),
            "output": (self._by_columns(f"{attention}.o_proj.weight", queries),),
            "gate_up": (Part(f"{mlp}.gate_proj.weight", inner), Part(f"{mlp}.up_proj.weight", inner)),
            "down": (self._by_columns(f"{mlp}.down_proj.weight", inner),),
        }

    def _head(self) -> Part:
        """The stored rows of this rank's part of the head; fewer than :func:`head_rows` where that pads."""
        config, shard = self._config, self._shard
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        rows = head_rows(config.vocab_size, shard.size)
        start = min(shard.rank * rows, config.vocab_size)
        return Part(f"{name}.weight", range(start, min(start + rows, config.vocab_size)))

    def _by_columns(self, name: str, columns: range) -> Part:
        return Part(name, columns=None if self._shard.size == 1 else columns)
