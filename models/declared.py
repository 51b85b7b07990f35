"""Declarations of a configuration's model: its layers, its stored tensors, the allowed splits. No torch here."""

import importlib

from splitserve.common.errors import ConfigError
from splitserve.models.config import ModelConfig
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.weight import Units, Weight


def declare(config: ModelConfig) -> Decoder:
    """Return the model of ``config`` as its family declares it, without tensors."""
    family = importlib.import_module(f"splitserve.models.families.{config.architecture}")
    decoder: Decoder = family.build(config)
    return decoder


def stored_weights(config: ModelConfig) -> dict[str, Weight]:
    """Return every tensor that a checkpoint of this configuration must have, by name."""
    return {weight.name: weight for weight in declare(config).weights()}


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Raise :class:`ConfigError` that says which sizes work, unless ``size`` ranks can share the model evenly."""
    units = _shared_units(declare(config))
    if all(unit.fits(size) for unit in units):
        return
    most = min(unit.count for unit in units if not unit.repeated)
    sizes = [str(other) for other in range(1, most + 1) if all(unit.fits(other) for unit in units)]
    labels = [unit.label for unit in units]
    raise ConfigError(
        f"{', '.join(labels[:-1])} and {labels[-1]} can't be shared by {size} tensor-parallel ranks; "
        f"{', '.join(sizes)} work"
    )


def _shared_units(decoder: Decoder) -> list[Units]:
    """Return the different kinds of units that ranks share, in the order of the layers."""
    dimensions = [dimension for weight in decoder.weights() for dimension in (weight.rows, weight.columns)]
    return list(dict.fromkeys(dimension for dimension in dimensions if isinstance(dimension, Units)))
