"""Settings of a cluster spec as plain records, derived from the declarations of its parts and the engine's config."""

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Meta, structs

from splitserve.orchestration.spec.cluster_spec import LOCATIONS, ClusterSpec, PoolSpec, locations_of
from splitserve.protocol.config import EngineConfig, HttpLimits, LMCacheConfig, ProtocolConfig, RouterConfig
from splitserve.protocol.settings import Setting, hints_of, meta_of, setting_of

_DECLARED: dict[str, tuple[type[msgspec.Struct], str]] = {
    location: (config, field)
    for config in (EngineConfig, RouterConfig, LMCacheConfig)
    for field, location in locations_of(config).items()
}
"""Fields of configs by location: their declarations are also those of the document's settings there."""
_CONFIGS: dict[str, type[msgspec.Struct]] = {"engine": EngineConfig, "protocol": ProtocolConfig, "http": HttpLimits}
"""Parts whose fields are those of a config: defaults and ranges are declared there."""


@dataclass(frozen=True, slots=True)
class SpecSetting:
    """One setting: its location in a cluster spec (``pools[]`` for each pool), and its declaration.

    ``field``: the field of :class:`EngineConfig` that it sets, "" if none. ``kind``: its type in the document.
    """

    location: str
    field: str
    kind: Any
    meta: Meta
    setting: Setting
    default: Any

    @property
    def description(self) -> str:
        return self.meta.description or ""


def spec_settings() -> list[SpecSetting]:
    """Return all settings in the order of the document, but those of an engine at the end, as its config has them."""
    found = list(_settings_in(ClusterSpec, ""))
    order = {field: number for number, field in enumerate(EngineConfig.__struct_fields__)}
    return sorted(found, key=lambda each: order.get(each.field, -1))


def _settings_in(struct: type[msgspec.Struct], outer: str) -> Iterator[SpecSetting]:
    """Yield the settings of a part of the document, which is at ``outer``."""
    for field in structs.fields(struct):
        hint = hints_of(struct)[field.name]
        location = f"{outer}{field.name}"
        setting, part = setting_of(hint), _part_of(hint)
        if field.name in _CONFIGS and not outer:
            yield from _settings_of_config(_CONFIGS[field.name], f"{location}.")
        elif part is PoolSpec:
            yield from _settings_in(part, "pools[].")
        elif part is not None and not (field.name in _CONFIGS and outer):
            if setting.flags:
                yield SpecSetting(setting.location, "", str, meta_of(hint), setting, "")
            if location in _DECLARED:
                yield _setting(location, hint, field)
            yield from (each for each in _settings_in(part, f"{location}.") if each.location != setting.location)
        elif part is None:
            yield _setting(location, hint, field)


def _setting(location: str, hint: Any, field: structs.FieldInfo) -> SpecSetting:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if location not in _DECLARED:
        return SpecSetting(location, "", hint, meta_of(hint), setting_of(hint), default)
    config, name = _DECLARED[location]
    declared = hints_of(config)[name]
    engine_field = name if config is EngineConfig else ""
    return SpecSetting(location, engine_field, hint, meta_of(declared), setting_of(declared), default)


def _settings_of_config(config: type[msgspec.Struct], outer: str) -> Iterator[SpecSetting]:
    for field in structs.fields(config):
        if config is EngineConfig and field.name in LOCATIONS:
            continue
        hint = hints_of(config)[field.name]
        name = field.name if config is EngineConfig else ""
        yield SpecSetting(f"{outer}{field.name}", name, hint, meta_of(hint), setting_of(hint), field.default)


def _part_of(hint: Any) -> type[msgspec.Struct] | None:
    """Return the part of the document that a field holds; None if the field is a value."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((part for each in typing.get_args(hint) if (part := _part_of(each)) is not None), None)
