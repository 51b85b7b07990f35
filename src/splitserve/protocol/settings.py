"""Annotations of settings: what a field means, which values it takes, and how users give it.

A field of a config or of a cluster spec is annotated with :class:`msgspec.Meta` (its description and range) and, where
users set it, with a :class:`Setting`. Checks, options, the YAML reader, the JSON schema and docs/reference/settings.md
are made from these.
"""

import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The form in which users give a setting."""

    flags: tuple[str, ...] = ()  # options of `splitserve serve`, the main one first; none: only in a cluster spec
    metavar: str = ""
    group: str = ""  # heading under which --help lists it
    choices: tuple[str, ...] = ()
    const: Any = None  # the value that an option without an argument stands for
    parse: Callable[[str], Any] | None = None  # the option's argument as a value; None: by the field's type
    place: str = ""  # location in the cluster spec, where it isn't that of the field itself
    further: str = ""  # location in the cluster spec of further values, of an option that takes several
    help: str = ""  # of the option, where the description doesn't fit


_NONE = Setting()


@cache
def hints_of(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the types of ``struct``'s fields with their annotations."""
    hints: dict[str, Any] = typing.get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def setting_of(hint: Any) -> Setting:
    """Return the annotation of a field; an empty one if it has none."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Setting)), _NONE)


def meta_of(hint: Any) -> Meta:
    """Return the description and range of a field, of all its annotations together."""
    found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Meta)]
    names = ("ge", "gt", "le", "description")
    return Meta(**{name: value for name in names for each in found if (value := getattr(each, name)) is not None})


def plain_types(hint: Any) -> list[Any]:
    """Return the types that a union is made of, without annotations; of another type, itself."""
    if hasattr(hint, "__metadata__"):
        return plain_types(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [plain for each in typing.get_args(hint) for plain in plain_types(each)]
    return [hint]


def choices_of(hint: Any) -> list[Any]:
    """Return the values of literals and enums; none for a type with other values."""
    choices: list[Any] = []
    for plain in plain_types(hint):
        if typing.get_origin(plain) is typing.Literal:
            choices += typing.get_args(plain)
        elif isinstance(plain, type) and issubclass(plain, Enum):
            choices += plain
    return choices


def description_of(hint: Any) -> Meta:
    """Return :func:`meta_of` for a reader that leaves the range to :func:`problems_of`, which has better words."""
    meta = meta_of(hint)
    bounds = {"minimum": meta.ge, "exclusiveMinimum": meta.gt, "maximum": meta.le}
    schema = {name: bound for name, bound in bounds.items() if bound is not None}
    return Meta(description=meta.description, extra_json_schema=schema or None)


def problems_of(settings: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Yield the fields of ``settings`` whose value is no choice or out of range, each with its problem in words."""
    for field, hint in hints_of(type(settings)).items():
        value = getattr(settings, field)
        choices = setting_of(hint).choices
        if choices and value not in choices:
            yield field, f"is {value!r}; choose one of {', '.join(choices)}"
        elif isinstance(value, int | float) and not _is_within(meta_of(hint), value):
            yield field, f"must be {range_words(meta_of(hint))}, got {value}"


def _is_within(meta: Meta, value: float) -> bool:
    is_low = (meta.ge is not None and value < meta.ge) or (meta.gt is not None and value <= meta.gt)
    return math.isfinite(value) and not is_low and (meta.le is None or value <= meta.le)


def range_words(meta: Meta) -> str:
    """Return the range of a number like ``between 0 and 4096``; "" if it has none."""
    if meta.ge is not None and meta.le is not None:
        return f"between {_number(meta.ge)} and {_number(meta.le)}"
    if meta.gt is not None and meta.le is not None:
        return f"more than {_number(meta.gt)} and at most {_number(meta.le)}"
    if meta.ge is not None:
        return f"at least {_number(meta.ge)}"
    return f"more than {_number(meta.gt)}" if meta.gt is not None else ""


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
