"""Plain data (of YAML, or of options) to a cluster spec, with errors in words that name the place."""

import difflib
import re
import typing
from typing import Any

import msgspec

from splitserve.orchestration.spec import ClusterSpec, SecretRef, SpecError

STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # of a place: a key, or an index
_PLACE = re.compile(r"^(.*) - at `\$\.?(.*)`$")
_PLAIN_WORDS = {
    "object": "a mapping (key: value)",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


def convert_spec(document: Any) -> ClusterSpec:
    """Strictly: no unknown key, no guess at types. Raises :class:`SpecError`."""
    try:
        return msgspec.convert(document, ClusterSpec)
    except msgspec.ValidationError as error:
        raise SpecError([_explain(str(error))]) from None


def _explain(message: str) -> tuple[str, str]:
    """msgspec's words as a place and what is wrong there."""
    match = _PLACE.match(message)
    text, place = (match[1], match[2]) if match else (message, "")
    kind = _kind_at(place)
    if place.startswith("secrets.") and kind is not None and _is_struct(kind, SecretRef) and "got `" in text:
        return place, "give a reference, like {env: NAME} or {file: PATH}: secrets are never written into a spec"
    if (unknown := re.match(r"Object contains unknown field `(.*)`", text)) is not None:
        return f"{place}.{unknown[1]}".lstrip("."), f"there is no such setting{_suggest(unknown[1], kind)}"
    if (missing := re.match(r"Object missing required field `(.*)`", text)) is not None:
        return f"{place}.{missing[1]}".lstrip("."), "is missing and has no default"
    if (choice := re.match(r"Invalid enum value (.*)", text)) is not None:
        return place, f"is {choice[1]}; choose one of {', '.join(map(str, _choices(kind)))}"
    if (pattern := re.match(r"Expected `str` matching regex '(.*)'", text)) is not None:
        return place, f"must match {pattern[1]}: lower-case letters, digits and dashes, at most 40"
    if (bound := re.match(r"Expected `(\w+)` (.*)", text)) is not None:
        return place, f"must be {_PLAIN_WORDS.get(bound[1], bound[1])} {bound[2]}"
    wrong = re.match(r"Expected `(.*)`, got `(.*)`", text)
    if wrong is None:
        return place, text[:1].lower() + text[1:].replace("`", "")
    place = place.replace("[...]", "")  # of a mapping's values, msgspec doesn't say which
    wanted = " or ".join(_PLAIN_WORDS.get(word, word) for word in wrong[1].split(" | "))
    remedy = "; quote it" if "str" in wrong[1].split(" | ") else ""
    return place, f"must be {wanted}, but is {_PLAIN_WORDS.get(wrong[2], wrong[2])}{remedy}"


def _suggest(name: str, kind: Any) -> str:
    fields = list(_fields(kind))
    close = [field for field in fields if name in field] or difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(fields)}"


def _kind_at(place: str) -> Any:
    """The type of what belongs at ``place``; None if that isn't known."""
    kind: Any = ClusterSpec
    for name, index in STEP.findall(place):
        if index or name == "...":
            arguments = [each for part in _parts(kind) for each in typing.get_args(part)]
            kind = arguments[-1] if arguments else None
        else:
            kind = _fields(kind).get(name)
    return kind


def _parts(kind: Any) -> list[Any]:
    """``kind`` without annotations, and what a union is made of."""
    if hasattr(kind, "__metadata__"):
        return _parts(kind.__origin__)
    if typing.get_origin(kind) is typing.Union or type(kind).__name__ == "UnionType":
        return [part for argument in typing.get_args(kind) for part in _parts(argument)]
    return [kind]


def _is_struct(kind: Any, struct: type[msgspec.Struct]) -> bool:
    return any(part is struct for part in _parts(kind))


def _fields(kind: Any) -> dict[str, Any]:
    for part in _parts(kind):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return typing.get_type_hints(part, include_extras=True)
    return {}


def _choices(kind: Any) -> list[Any]:
    return [
        value for part in _parts(kind) if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)
    ]
