"""The sampling features' parameters as fields of the HTTP schema, made from their one declaration."""

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import inspect
from pydantic import BaseModel, Field, create_model

from splitserve.protocol.sampling_features import FeatureParams

_NAMES = frozenset(FeatureParams.__struct_fields__)
_FRACTIONS = {"ge", "le", "gt", "lt"}


def with_sampling_fields(name: str, base: type[BaseModel], *, left_out: Collection[str] = ()) -> Any:
    """Return a subclass of ``base`` with an optional field for each parameter, except those ``left_out``, which clients
    write in another form. None stands for the neutral value."""
    types = {field.name: field.type for field in inspect.type_info(FeatureParams).fields}  # type: ignore[attr-defined]
    fields: dict[str, Any] = {
        field.name: (http_type(types[field.name]) | None, None)
        for field in msgspec.structs.fields(FeatureParams)
        if field.name not in left_out
    }
    return create_model(name, __base__=base, **fields)


def http_type(kind: inspect.Type) -> Any:
    """Return the type with its bounds as pydantic has it. Raises TypeError for one that HTTP has no form for."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return Annotated[http_type(inner), Field(description=(extra or {}).get("description"))]
        case inspect.BoolType():
            return bool
        case inspect.FloatType() | inspect.IntType():
            number: Any = float if isinstance(kind, inspect.FloatType) else int
            bounds = {bound: value for bound in _FRACTIONS if (value := getattr(kind, bound)) is not None}
            return Annotated[number, Field(**bounds)]
        case inspect.VarTupleType(item_type=item, min_length=shortest, max_length=longest):
            items: Any = http_type(item)
            return Annotated[list[items], Field(min_length=shortest, max_length=longest, fail_fast=True)]
        case inspect.DictType(key_type=key, value_type=value, max_length=longest):
            keys: Any = Annotated[http_type(key), Field(strict=False)]  # keys of JSON objects are strings
            values: Any = http_type(value)
            return Annotated[dict[keys, values], Field(max_length=longest)]
        case _:
            raise TypeError(f"a sampling parameter can't be of type {kind}")


def sampling_values(request: BaseModel) -> dict[str, Any]:
    """Return the parameters that a body sets, for :class:`FeatureParams`; those in another form are as they came."""
    values = ((name, getattr(request, name)) for name in _NAMES & request.model_fields_set)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values if value is not None}
