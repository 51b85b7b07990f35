"""Annotations of settings: what a field means, which values it takes, and how users give it.

A field of a config or of a cluster spec is annotated with :class:`msgspec.Meta` (its description and range) and, where
users set it, with a :class:`Setting`. Checks, options, the YAML reader, the JSON schema and docs/reference/settings.md
are made from these.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import Meta

from splitserve.common.errors import ConfigError


class SettingsError(ConfigError):
    """Settings that can't work. ``problems`` are pairs of a field and what is wrong with it."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field} {text}" for field, text in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The form in which users give a setting."""

    flags: tuple[str, ...] = ()  # options of ``command``, the main one first; none: only in a cluster spec
    command: str = "serve"  # the command of `splitserve` with those options
    metavar: str = ""
    group: str = ""  # heading under which --help lists it
    choices: tuple[str, ...] = ()
    const: Any = None  # the value that an option without an argument stands for
    # Form of the option's argument; "": by the field's type.
    form: Literal["", "size", "address", "path", "source", "name or path"] = ""
    location: str = ""  # in the cluster spec, where it isn't that of the field itself
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
    names = ("ge", "gt", "le", "min_length", "description")
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
    bounds = {"minimum": meta.ge, "exclusiveMinimum": meta.gt, "maximum": meta.le, "minLength": meta.min_length}
    schema = {name: bound for name, bound in bounds.items() if bound is not None}
    return Meta(description=meta.description, extra_json_schema=schema or None)


def problems_of(settings: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Yield the fields of ``settings`` whose value is no choice or out of range, each with its problem in words."""
    for field in settings.__struct_fields__:
        if problem := problem_of(type(settings), field, getattr(settings, field)):
            yield field, problem


def problem_of(struct: type[msgspec.Struct], field: str, value: Any) -> str:
    """Return why ``value`` is no choice or out of range for a field of ``struct``, in words; "" if it is neither."""
    hint = hints_of(struct)[field]
    choices = setting_of(hint).choices
    if choices and value not in choices:
        return f"is {value!r}; choose one of {', '.join(choices)}"
    if isinstance(value, int | float) and not is_within(meta_of(hint), value):
        return f"must be {range_words(meta_of(hint))}, got {value}"
    return ""


def is_within(meta: Meta, value: float) -> bool:
    """Return whether ``value`` is finite and in the range of ``meta``."""
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
