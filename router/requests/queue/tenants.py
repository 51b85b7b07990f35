"""Tenants of the endpoint: their keys, their shares of a busy cluster, and their limits. Pure, but for the file.

tenants:
  - name: search
    keys: [sk-search-1, sk-search-2]
    weight: 2
    max_requests_in_flight: 200
  - name: batch
    keys: [sk-batch]
    tokens_per_minute: 500000
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from splitserve.common.errors import ConfigError
from splitserve.common.faults import words_of_fault

MAX_FILE_BYTES = 1 << 20
MAX_TENANTS = 1024
MAX_KEYS = 16
NO_KEYS: Mapping[str, str] = MappingProxyType({})
_MAX_DEPTH = 8
OWN = "operator"
"""The tenant of requests with the cluster's own key, or without any where none is needed."""

Key = Annotated[str, Meta(min_length=8, max_length=256, pattern=r"^[!-~]+$")]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # of its share while requests queue
    max_requests_in_flight: Annotated[int, Meta(ge=0)] = 0  # 0: no limit of its own
    tokens_per_minute: Annotated[float, Meta(ge=0)] = 0.0  # of prompts and outputs; 0: no limit


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: Annotated[tuple[Tenant, ...], Meta(max_length=MAX_TENANTS)]


class Tenants:
    """The tenants of a file, by key and by name."""

    def __init__(self, tenants: tuple[Tenant, ...] = ()) -> None:
        self.by_name: Mapping[str, Tenant] = {OWN: Tenant(name=OWN)} | {each.name: each for each in tenants}
        self._by_digest = {digest_of(key.encode()): each for each in tenants for key in each.keys}
        self.is_empty = not tenants

    def of_key(self, key: bytes) -> Tenant | None:
        """Return the tenant with a key; None for a key of nobody."""
        return self._by_digest.get(digest_of(key))

    def share_of(self, name: str) -> float:
        """Return a tenant's share of a cluster that all of the file's tenants use."""
        weights = {each: tenant.weight for each, tenant in self.by_name.items() if each != OWN}
        own = self.named(name).weight
        return own / sum((weights | {name: own}).values())

    def named(self, name: str) -> Tenant:
        """Return a tenant by its name; one that is gone from the file has no limits for the requests it still has."""
        return self.by_name.get(name) or Tenant(name=name)


NO_TENANTS = Tenants()


def digest_of(key: bytes) -> bytes:
    """Return what keys are found by: the time of a look-up then says nothing about the key."""
    return hashlib.sha256(key).digest()


def read_tenants(path: Path, own_keys: Mapping[str, str] = NO_KEYS) -> Tenants:
    """Return the tenants of a YAML file. ``own_keys``: those of the cluster, by what they are called; "" for none.

    Raises :class:`ConfigError` that names the file and the fault. A file without tenants is one if the cluster has no
    key either: it would open the server to everybody.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--tenants: can't read {path}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--tenants: {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        _check_form(content, path)
        document = yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:  # its text shows the lines, which may hold keys
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "an unknown line"
        raise ConfigError(f"--tenants: {path}: {error.problem or error.context} ({place})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--tenants: {path}: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--tenants: {path} must be a mapping with the list `tenants`")
    try:
        tenants = msgspec.convert(document, _File).tenants
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--tenants: {path}: {words_of_fault(str(error), document, _fields_at, hidden='keys')}"
        ) from None
    for problem in _contradictions(tenants, own_keys):
        raise ConfigError(f"--tenants: {path}: {problem}")
    return Tenants(tenants)


def _contradictions(tenants: Sequence[Tenant], own_keys: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong between tenants, or between them and the cluster's own keys. No key is shown."""
    owners = {key: what for what, key in own_keys.items() if key}
    if not tenants and not owners:
        yield "it has no tenants, and the cluster has no key: everybody would be let in; give one of them"
    names = set[str]()
    for tenant in tenants:
        if tenant.name == OWN or tenant.name in names:
            yield f"the name {tenant.name!r} is taken; the tenants' names must differ, and none may be {OWN!r}"
        names.add(tenant.name)
        for key in tenant.keys:
            if key in owners:
                yield f"a key of {tenant.name!r} is also {owners[key]}; a key may stand in one place only"
            owners[key] = f"a key of {tenant.name!r}"


def _fields_at(location: str) -> Sequence[str]:
    return (Tenant if location else _File).__struct_fields__


def _check_form(content: bytes, path: Path) -> None:
    """Raise :class:`ConfigError` for aliases, which may stand for billions of values, and for deep nesting."""
    depth = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"--tenants: {path} has a YAML alias; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"--tenants: {path} has more than {_MAX_DEPTH} levels")
