"""Groups of a model's cache: the layers that keep keys and values of every token, and those that keep a window's."""

from typing import NamedTuple

from splitserve.models.config import ModelConfig
from splitserve.protocol.cache_layout import DTYPE_BYTES, CacheGroup, CacheLayout, Field, GroupKind
from splitserve.protocol.memory_records import latent_group


class LayerGroup(NamedTuple):
    """Layers that keep keys and values of the same tokens. ``window``: 0 where they keep those of every token."""

    layers: tuple[int, ...]
    window: int = 0


def layer_groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Return the groups of a model's layers, first the one that keeps every token.

    Hashes of that group's blocks name the prefixes of all groups, so it is never empty: if every layer has a window,
    the first one keeps every token all the same. A window as long as the longest sequence makes no group.
    """
    sliding = config.sliding_layers if config.window and config.window < config.max_position_embeddings else ()
    full = tuple(layer for layer in range(config.num_layers) if layer not in sliding) or sliding[:1]
    rest = tuple(layer for layer in sliding if layer not in full)
    if not rest:
        return (LayerGroup(full),)
    assert config.window is not None
    return LayerGroup(full), LayerGroup(rest, config.window)


def cache_groups(config: ModelConfig, block_size: int, dtype: str) -> tuple[CacheGroup, ...]:
    """Return the same as groups of a :class:`.LayoutRecord`, which has none for a single group.

    ``config``: of the whole model, not of one rank's part.
    """
    groups = layer_groups(config)
    return () if len(groups) == 1 else _groups_of(config, groups, block_size, dtype)


def cache_layout(config: ModelConfig, block_size: int, dtype: str, num_ranks: int = 1) -> CacheLayout:
    """Return the whole cache of a model on ``num_ranks`` ranks; ``dtype`` by its name in PyTorch."""
    if config.latent is not None:
        return CacheLayout((latent_group(config.num_layers, block_size, config.latent.width, dtype),), num_ranks)
    return CacheLayout(_groups_of(config, layer_groups(config), block_size, dtype), num_ranks)


def _groups_of(
    config: ModelConfig, groups: tuple[LayerGroup, ...], block_size: int, dtype: str
) -> tuple[CacheGroup, ...]:
    head_bytes = 2 * block_size * config.head_dim * DTYPE_BYTES[dtype]
    kv = Field("kv", dtype, config.num_kv_heads, head_bytes)
    return tuple(
        CacheGroup(GroupKind.WINDOW if group.window else GroupKind.FULL, group.layers, block_size, (kv,), group.window)
        for group in groups
    )
