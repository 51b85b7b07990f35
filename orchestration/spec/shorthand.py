"""The cluster spec that the options of ``splitserve serve`` stand for, made from a few numbers."""

from typing import Any

from msgspec import Struct, structs, to_builtins

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import (
    LOCATIONS,
    ClusterSpec,
    EngineSettings,
    ProtocolSettings,
    RouterSpec,
)
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig, RouterConfig
from splitserve.protocol.request import Role

_ROUTER: dict[str, Any] = {field.name: field.default for field in structs.fields(RouterConfig)}
_ENGINE: dict[str, Any] = {field.name: field.default for field in structs.fields(EngineConfig)}
_PROTOCOL = ProtocolConfig()


def simple_spec(
    engine: EngineConfig,
    *,
    num_prefill: int = 0,
    num_decode: int = 0,
    num_mixed: int = 0,
    prefill_tp: int = 0,
    decode_tp: int = 0,
    port: int = _ROUTER["port"],
    policy: str = "least-loaded",
    protocol: ProtocolConfig = _PROTOCOL,
    **parts: Any,
) -> ClusterSpec:
    """Return a cluster whose pools are named after their roles and share ``engine``'s settings.

    ``policy``: by default one that sends each request to a pair, for benches and demonstrations of hand-overs.

    Without any worker there is a mixed one. ``prefill_tp``, ``decode_tp``: ranks of the workers of that role, if they
    differ from the engine's. ``parts`` are further parts of :class:`ClusterSpec`. Raises :class:`ConfigError`, also for
    settings that apply to no worker.
    """
    numbers = {Role.PREFILL: num_prefill, Role.DECODE: num_decode, Role.MIXED: num_mixed}
    for role, number in numbers.items():
        if number < 0:
            raise ConfigError(f"--{role} is {number}; it must not be negative")
    if not any(numbers.values()):
        numbers[Role.MIXED] = 1
    ranks = {Role.PREFILL: prefill_tp, Role.DECODE: decode_tp}
    for role, num_ranks in ranks.items():
        if num_ranks and not numbers[role]:
            raise ConfigError(
                f"--{role}-tp is {num_ranks}, but there are no {role} workers; --tensor-parallel-size is for all"
            )
    for flag, name in (("--disk-kv-size", "disk_kv_bytes"), ("--disk-kv-backend", "disk_kv_backend")):
        if not engine.disk_kv_dir and getattr(engine, name) != _ENGINE[name]:
            raise ConfigError(f"{flag} is for KV in files: say where, with --disk-kv-dir")
    document: dict[str, Any] = {
        "router": RouterSpec(port=port, policy=policy),
        **parts,
        "pools": [_pool(engine, role, number, ranks.get(role, 0)) for role, number in numbers.items() if number],
        "engine": _settings_of(EngineSettings, engine),
        "protocol": _settings_of(ProtocolSettings, protocol),
    }
    document = to_builtins(document)  # constructors check no bounds
    for field, location in LOCATIONS.items():
        if (value := getattr(engine, field)) != _ENGINE.get(field) and _is_free(document, location):
            put(document, location, value)
    return convert_spec(document)


def _pool(engine: EngineConfig, role: Role, count: int, num_ranks: int) -> dict[str, Any]:
    """Return a pool with ``engine``'s settings; ``num_ranks``: ranks of each worker, 0: the engine's number."""
    pool: dict[str, Any] = {"name": role.value, "role": role.value, "count": count}
    for field, location in LOCATIONS.items():
        if location.startswith("pools[]."):
            put(pool, location.removeprefix("pools[]."), getattr(engine, field))
    return {**pool, "tensor_parallel_size": num_ranks or engine.tensor_parallel_size}


def put(document: dict[str, Any], location: str, value: Any) -> None:
    """Set the value at ``location`` of a cluster spec's document, like ``router.port``."""
    *outer, name = location.split(".")
    for each in outer:
        document = document.setdefault(each, {})
    document[name] = value


def _is_free(document: dict[str, Any], location: str) -> bool:
    """Return whether ``location``, outside of the pools, is left to the engine's settings."""
    part, *names = location.split(".")
    given = document.get(part, {})
    return part != "pools[]" and isinstance(given, dict) and names[0] not in given


def _settings_of(kind: Any, config: Struct) -> Any:
    """Return the fields of ``config`` that differ from their defaults."""
    defaults = {field.name: field.default for field in structs.fields(config)}
    values = {name: getattr(config, name) for name in kind.__struct_fields__}
    return kind(**{name: value for name, value in values.items() if value != defaults[name]})
