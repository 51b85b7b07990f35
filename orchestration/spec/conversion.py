"""Conversion of plain data (from YAML or from options) to a cluster spec, with errors that name the location."""

import copy
import math
import re
import reprlib
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from splitserve.orchestration.cli.command_parser import closest
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, SecretRef, SpecError
from splitserve.orchestration.spec.contradictions import contradictions
from splitserve.protocol.request import Role
from splitserve.protocol.settings import choices_of, plain_types

STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # of a path: a key, or an index
MAX_PROBLEMS = 100
_PLACE = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$")
_PLAIN_WORDS = {
    "object": "a mapping (key: value)",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "empty",
}
_SOME_VALUE = "..."  # in msgspec's locations: of a mapping
_UNKNOWN = "there is no such setting"
_PLACEHOLDERS: dict[Any, Any] = {
    "model": {"path": "."},
    "pools": [{"name": "placeholder", "role": Role.MIXED.value}],
    "path": ".",
    "role": Role.MIXED.value,
}


def convert_spec(document: Any) -> ClusterSpec:
    """Convert strictly: no unknown keys, no guesses at types. Raises :class:`SpecError` with all problems."""
    spec, problems = _repaired(document)
    if spec is not None and not problems:
        problems = list(contradictions(spec))
    elif spec is not None:
        wrong = [location for location, text in problems if not text.startswith(_UNKNOWN)]
        problems += [each for each in contradictions(spec) if not may_follow(each[0], wrong)]
    if problems or spec is None:
        raise SpecError(problems, spec)
    return spec


Steps: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the document's root."""


@dataclass
class _FaultError(Exception):
    """A value of a wrong type or out of range. ``is_key``: the fault is a key of the mapping there that isn't text."""

    steps: Steps
    text: str
    is_key: bool = False


def _convert(document: Any) -> ClusterSpec:
    """Convert the document; raises :class:`_FaultError` for the first fault in types and ranges."""
    for steps in _not_finite(document, ()):
        raise _FaultError(steps, "must be a finite number")
    try:
        return msgspec.convert(document, ClusterSpec)
    except msgspec.ValidationError as error:
        raise _fault(str(error), document) from None


def _fault(message: str, document: Any) -> _FaultError:
    """Return msgspec's message as a fault with its location."""
    match = _PLACE.match(message)
    text, location = (match[1], match[2]) if match else (message, "")
    steps: Steps = tuple(int(index) if index else name for name, index in STEP.findall(location))
    if location.endswith(f"[{_SOME_VALUE}]"):
        steps = (*steps, _SOME_VALUE)
    kind = _kind_at(steps)
    if "at `key` in" in message:
        strange = next(key for key in _value_at(document, steps) if not isinstance(key, str))
        return _FaultError(steps, f"has the key {strange!r}, which is no text; quote it", is_key=True)
    if (unknown := re.match(r"Object contains unknown field `(.*)`", text)) is not None:
        return _FaultError((*steps, unknown[1]), f"{_UNKNOWN}{_suggest(unknown[1], kind)}")
    if (missing := re.match(r"Object missing required field `(.*)`", text)) is not None:
        return _FaultError((*steps, missing[1]), "is missing and has no default")
    if steps and steps[-1] == _SOME_VALUE:
        steps = (*steps[:-1], _wrong_key(_value_at(document, steps[:-1]), kind))
    return _FaultError(steps, _explain(text, steps, kind) + _given(text, steps, document))


def _wrong_key(mapping: Mapping[str, Any], kind: Any) -> str:
    """Return the key of the first value that isn't of that kind; msgspec doesn't report it."""
    for key, value in mapping.items():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return key
    return _SOME_VALUE


def _repaired(document: Any) -> tuple[ClusterSpec | None, list[tuple[str, str]]]:
    """Return the spec, and all faults in types and ranges: each is repaired so that the next one shows."""
    problems: dict[str, str] = {}
    while len(problems) < MAX_PROBLEMS:
        try:
            return _convert(document), list(problems.items())
        except _FaultError as fault:
            location = format_location(fault.steps)
            if location in problems:
                break
            document = document if problems else copy.deepcopy(document)
            problems[location] = fault.text
            if not _repair(document, fault):
                break
    return None, list(problems.items())


def _repair(document: Any, fault: _FaultError) -> bool:
    """Remove a wrong value, or insert a missing one; return False if that isn't possible."""
    if fault.is_key:
        mapping = _value_at(document, fault.steps)
        for key in [key for key in mapping if not isinstance(key, str)]:
            del mapping[key]
        return True
    match fault.steps:
        case ():
            return False
        case ("model" | "pools" as name,):
            document[name] = copy.deepcopy(_PLACEHOLDERS[name])
        case ("pools", int(index)):
            document["pools"][index] = {"name": f"placeholder-{index}", "role": Role.MIXED.value}
        case ("pools", int(index), "name"):
            document["pools"][index]["name"] = f"placeholder-{index}"
        case ("model", "path") | ("pools", int(), "role"):
            _value_at(document, fault.steps[:-1])[fault.steps[-1]] = _PLACEHOLDERS[fault.steps[-1]]
        case _:
            del _value_at(document, fault.steps[:-1])[fault.steps[-1]]
    return True


def may_follow(location: str, wrong: Collection[str]) -> bool:
    """Return whether a problem at ``location`` may follow from a wrong value there, below it, or above it."""
    return any(other.startswith(location) or location.startswith(other) for other in wrong)


def _value_at(document: Any, steps: Steps) -> Any:
    for step in steps:
        document = document[step]
    return document


def format_location(steps: Steps) -> str:
    """Format a location, like ``pools[1].count``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")


def _not_finite(value: Any, steps: Steps) -> Iterator[Steps]:
    """Yield the locations of infinite numbers and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        yield steps
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _not_finite(part, (*steps, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _not_finite(part, (*steps, index))


def _explain(text: str, steps: Steps, kind: Any) -> str:
    """Return msgspec's message in plain words."""
    if steps[:1] == ("secrets",) and kind is not None and _is_struct(kind, SecretRef) and "got `" in text:
        return "give a reference, like {env: NAME} or {file: PATH}: secrets are never written into a spec"
    if (choice := re.match(r"Invalid enum value (.*)", text)) is not None:
        choices = [str(each) for each in choices_of(kind)]
        close = closest(choice[1].strip("'"), choices)
        return f"is {choice[1]};{f' did you mean {close}?' if close else ''} choose one of {', '.join(choices)}"
    if (pattern := re.match(r"Expected `str` matching regex '(.*)'", text)) is not None:
        return f"must match {pattern[1]}: lower-case letters, digits and dashes, at most 40"
    if re.match(r"Expected `(str|array)` of length >= 1", text):
        return "must not be empty"
    if (bound := re.match(r"Expected `(\w+)` (.*)", text)) is not None:
        return f"must be {_PLAIN_WORDS.get(bound[1], bound[1])} {bound[2]}"
    wrong = re.match(r"Expected `(.*)`, got `(.*)`", text)
    if wrong is None:
        return text[:1].lower() + text[1:].replace("`", "")
    wanted = " or ".join(_PLAIN_WORDS.get(word, word) for word in wrong[1].split(" | "))
    remedy = "; quote it" if "str" in wrong[1].split(" | ") and wrong[2] in ("int", "float", "bool") else ""
    return f"must be {wanted}, but is {_PLAIN_WORDS.get(wrong[2], wrong[2])}{remedy}"


def _given(text: str, steps: Steps, document: Any) -> str:
    """Return the value that is out of range, in words; "" for other faults, and for secrets."""
    if not re.match(r"Expected `\w+` (?!of length)", text) or steps[:1] == ("secrets",):
        return ""
    return f", got {reprlib.repr(_value_at(document, steps))}"


def _suggest(name: str, kind: Any) -> str:
    fields = list(_fields(kind))
    close = closest(name, fields)
    return f"; did you mean {close}?" if close else f"; there are {', '.join(fields)}"


def _kind_at(steps: Steps) -> Any:
    """Return the type of the value that belongs there; None if that isn't known."""
    kind: Any = ClusterSpec
    for step in steps:
        if isinstance(step, int) or step == _SOME_VALUE:
            arguments = [each for part in plain_types(kind) for each in typing.get_args(part)]
            kind = arguments[-1] if arguments else None
        else:
            kind = _fields(kind).get(step)
    return kind


def _is_struct(kind: Any, struct: type[msgspec.Struct]) -> bool:
    return any(part is struct for part in plain_types(kind))


def _fields(kind: Any) -> dict[str, Any]:
    for part in plain_types(kind):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return typing.get_type_hints(part, include_extras=True)
    return {}
