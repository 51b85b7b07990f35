"""Sampling parameters of requests that set none: those of the checkpoint's generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.common.model_files import GENERATION_CONFIG, MAX_CONFIG_BYTES, read_json_object, shown
from splitserve.protocol.config import AUTO, NONE
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import NEUTRAL_VALUES

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are defaults of requests; its other fields don't count."""
_FALLBACK: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **NEUTRAL_VALUES}


class SamplingDefaults:
    """Values by parameter of a request that sets none, and ``source``, the file that they come from ("" for none)."""

    def __init__(self, values: Mapping[str, float], source: str = "") -> None:
        self.values = dict(values)
        self.source = source

    def describe(self) -> str:
        """Return the values in words; "" if the file sets none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


NO_DEFAULTS = SamplingDefaults({})


def read_sampling_defaults(generation_config: str, model_dir: Path) -> SamplingDefaults:
    """Return the defaults that the option ``--generation-config`` selects: ``auto``, ``none`` or a directory.

    Raises :class:`CheckpointError` for a file with values that can't be sampled with, :class:`ConfigError` for a
    directory without the file.
    """
    if generation_config == NONE:
        return NO_DEFAULTS
    path = (model_dir if generation_config == AUTO else Path(generation_config)) / GENERATION_CONFIG
    try:
        content = read_json_object(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        if generation_config == AUTO:
            return NO_DEFAULTS
        raise ConfigError(f"--generation-config: there is no {path}; give auto, none or a directory with it") from None
    values = {name: content[name] for name in _NAMES if content.get(name) is not None}
    for name, value in values.items():
        _check(name, value, path)
    return SamplingDefaults({name: value for name, value in values.items() if value != _FALLBACK[name]}, str(path))


def _check(name: str, value: Any, path: Path) -> None:
    """Raise :class:`CheckpointError` unless a request could set ``name`` to ``value``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    problem = "" if is_number else "it must be a number"
    if is_number:
        try:
            msgspec.convert({"max_tokens": 1, name: value}, SamplingParams)
        except (ConfigError, msgspec.ValidationError) as error:
            problem = str(error)
    if problem:
        raise CheckpointError(
            f"{path}: {name} is {shown(value)}: {problem}; correct the file, or serve with --generation-config none"
        )
