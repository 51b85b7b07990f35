"""Declarations of a configuration's model: its layers, its stored tensors, the allowed splits. No torch here."""

import importlib

from splitserve.common.errors import ConfigError
from splitserve.models.config import ModelConfig
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.weight import Units, Weight
from splitserve.models.weights.shard import Shard

_ALIGNMENT = 16  # of an expert's intermediate size on a rank, for its products to be fast


def declare(config: ModelConfig) -> Decoder:
    """Return the model of ``config`` as its family declares it, without tensors."""
    family = importlib.import_module(f"splitserve.models.families.{config.architecture}")
    decoder: Decoder = family.build(config)
    return decoder


def stored_weights(config: ModelConfig) -> dict[str, Weight]:
    """Return every tensor that a checkpoint of this configuration must have, by name. Those of a model of transformers'
    code are that library's to know: none."""
    if config.transformers is not None:
        return {}
    return {weight.name: weight for weight in declare(config).weights()}


def kv_elements(config: ModelConfig) -> int:
    """Return the elements of one token's keys and values in all layers."""
    if config.transformers is not None:
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return declare(config).kv_elements


def check_tensor_parallel_size(config: ModelConfig, size: int, expert_parallel: str = "auto") -> None:
    """Raise :class:`ConfigError` that says which sizes work, unless ``size`` ranks can share the model evenly."""
    shard_of(config, 0, size, expert_parallel)


def shard_of(config: ModelConfig, rank: int, size: int, expert_parallel: str = "auto") -> Shard:
    """Return what rank ``rank`` of ``size`` has of the model. ``expert_parallel``: "on": ranks share the experts;
    "off": each expert's intermediate dimension; "auto": the latter if every rank's share is aligned, or if there is no
    other way. Raises :class:`ConfigError` that says which sizes work if ranks can't share the model evenly."""
    if config.transformers is not None:
        return _whole(config, size, expert_parallel)
    if config.experts is None and expert_parallel == "on":
        raise ConfigError("expert_parallel is on, but the model has no experts; leave it at auto")
    decoder = declare(config)
    ways = {"on": (True,), "off": (False,), "auto": (False, True) if config.experts is not None else (False,)}
    units = {way: _shared_units(decoder, has_whole_experts=way) for way in ways[expert_parallel]}
    possible = [way for way, shared in units.items() if all(unit.fits(size) for unit in shared)]
    if not possible:
        raise ConfigError(_refusal(units, size, expert_parallel))
    is_split_well = False in possible and (len(possible) == 1 or _is_aligned(config, size))
    return Shard(rank, size, has_whole_experts=size > 1 and not is_split_well)


def _whole(config: ModelConfig, size: int, expert_parallel: str) -> Shard:
    """Return the only shard of a model of transformers' code. Raises :class:`ConfigError`."""
    if size > 1 or expert_parallel == "on":
        wanted = f"{size} tensor-parallel ranks" if size > 1 else "expert_parallel on"
        raise ConfigError(
            f"{config.architecture} runs through the model backend transformers, where a worker has one rank; got "
            f"{wanted}: start more workers instead"
        )
    return Shard()


def _is_aligned(config: ModelConfig, size: int) -> bool:
    """Return whether each rank's share of an expert has a size that products are fast with."""
    alignment = _ALIGNMENT if config.fp8 is None or config.fp8.block is None else config.fp8.block[0]
    return config.experts is None or config.experts.inner_size // size % alignment == 0


def _refusal(units: dict[bool, list[Units]], size: int, expert_parallel: str) -> str:
    """Return why ``size`` ranks can't share the model in any way, and which sizes work."""
    most = max(min(unit.count for unit in shared if not unit.repeated) for shared in units.values())
    sizes = [
        str(other)
        for other in range(1, most + 1)
        if any(all(unit.fits(other) for unit in shared) for shared in units.values())
    ]
    labels = list(dict.fromkeys(unit.label for shared in units.values() for unit in shared))
    forced = "" if expert_parallel == "auto" else f" with expert_parallel {expert_parallel}"
    return (
        f"{', '.join(labels[:-1])} and {labels[-1]} can't be shared by {size} tensor-parallel ranks{forced}; "
        f"{', '.join(sizes)} work"
    )


def _shared_units(decoder: Decoder, *, has_whole_experts: bool) -> list[Units]:
    """Return the different kinds of units that ranks share, in the order of the layers."""
    dimensions = dict.fromkeys(
        dimension for weight in decoder.weights() for dimension in weight.shared_dimensions(has_whole_experts)
    )
    return [dimension for dimension in dimensions if isinstance(dimension, Units)]
