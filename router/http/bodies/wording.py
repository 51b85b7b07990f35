"""Faults of bodies in plain words: what is allowed in a field of a body, and what was given there.

What is allowed follows from the JSON schema of the body's model, which clients see in /openapi.json, too.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import pydantic

from splitserve.router.http.api_error import clipped

Json: TypeAlias = dict[str, Any]

_MAX_SHOWN_CHARS = 60
_MAX_SHOWN_ITEMS = 8
_MAX_CHOICES = 16
_DEFINITION = "#/$defs/"
_KEY = "[key]"  # the last part of an issue's field if a key of a map is at fault
_NOUNS = {
    "string": ("text", "texts"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "array": ("a list", "lists"),
    "object": ("an object", "objects"),
    "null": ("null", "null"),
}
_KIND_BY_ISSUE = {
    "string": "string",
    "int": "integer",
    "float": "number",
    "finite": "number",
    "bool": "boolean",
    "list": "array",
    "too": "array",
    "dict": "object",
    "model": "object",
    "greater": "integer",
    "less": "integer",
}


def describe_fault(model: type[pydantic.BaseModel], issue: Any, field: str) -> str:
    """Return the message for an issue of pydantic with a body of ``model``; ``field`` is written as clients do.

    Examples: ``max_tokens must be a whole number of at least 1, got 0``; ``messages is required: a list of objects``.
    """
    kind, loc = issue["type"], issue["loc"]
    if kind == "value_error":  # raised by a validator of ours, in its own words
        return f"{field}: {issue['ctx']['error']}"
    if loc[-1] == _KEY:
        return f"{field}: keys must be token ids, got {shown(issue['input'])}"
    schema = _schema_of(model)
    if kind == "extra_forbidden":
        names = sorted({name for node in _nodes_at(schema, loc[:-1]) for name in node.get("properties", ())})
        return f"{field} is unknown; allowed there: {', '.join(names[:_MAX_CHOICES])}"
    nodes = _nodes_at(schema, loc)
    if kind == "missing":
        return f"{field} is required: {_describe_any(nodes)}"
    if len(nodes) > 1 and isinstance(loc[-1], int):  # an element of one of several kinds of lists
        wanted = _KIND_BY_ISSUE.get(kind.partition("_")[0])
        nodes = [node for node in nodes if node.get("type") == wanted] or nodes
    return f"{field} must be {_describe_any(nodes)}, got {shown(issue['input'])}"


def field_path(model: type[pydantic.BaseModel], issue: Any) -> str:
    """Return the field of an issue as clients write it (``messages[0].content``), without names of union members."""
    schema, loc = _schema_of(model), issue["loc"]
    if loc[-1] == _KEY:
        loc = loc[:-2]  # the map, whose key is at fault
    path = ""
    for depth, part in enumerate(loc):
        is_last_extra = issue["type"] == "extra_forbidden" and depth == len(loc) - 1
        if isinstance(part, int):
            path += f"[{part}]"
        elif is_last_extra or any(_has_field(node, part) for node in _nodes_at(schema, loc[:depth])):
            path += f".{part}" if path else part
    return path or str(loc[0])


def shown(value: Any) -> str:
    """Return a value of a body for a message: as JSON, but short, however long it is."""
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return f"text of {len(value)} characters"
    if isinstance(value, list) and len(value) > _MAX_SHOWN_ITEMS:
        return f"a list of {len(value)} items"
    if isinstance(value, dict) and len(value) > _MAX_SHOWN_ITEMS:
        return f"an object with {len(value)} fields"
    if isinstance(value, list | dict) and _is_nested(value):
        return "a list" if isinstance(value, list) else f"an object with the fields {', '.join(map(shown, value))}"
    try:
        return clipped(json.dumps(value, ensure_ascii=False), _MAX_SHOWN_CHARS)
    except (TypeError, ValueError):  # numbers of more than 4300 digits among others
        return f"a {type(value).__name__}"


def _is_nested(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return any(isinstance(each, dict | list) for each in values)


@cache
def _schema_of(model: type[pydantic.BaseModel]) -> Json:
    return model.model_json_schema()


def _nodes_at(schema: Json, loc: Sequence[str | int]) -> list[Json]:
    """Return the schemas of the values allowed at ``loc``. Names of union members in it are passed over."""
    definitions = schema.get("$defs", {})
    nodes = _alternatives(schema, definitions)
    for part in loc:
        if isinstance(part, int):
            found = [node["items"] for node in nodes if "items" in node]
        else:
            found = [node["properties"][part] for node in nodes if part in node.get("properties", ())]
            found = found or [node["additionalProperties"] for node in nodes if _is_map(node)]
        if found:
            nodes = [each for node in found for each in _alternatives(node, definitions)]
    return nodes


def _has_field(node: Json, name: str) -> bool:
    return name in node.get("properties", ()) or _is_map(node)


def _is_map(node: Json) -> bool:
    """Return whether a schema is that of an object with any keys and values of one kind."""
    return isinstance(node.get("additionalProperties"), dict)


def _alternatives(node: Json, definitions: Json) -> list[Json]:
    """Return the members of a union, without null; of another schema, itself."""
    if "$ref" in node:
        return _alternatives(definitions[node["$ref"].removeprefix(_DEFINITION)], definitions)
    members = node.get("anyOf") or node.get("oneOf")
    if not members:
        return [node]
    found = [each for member in members for each in _alternatives(member, definitions)]
    return [each for each in found if each.get("type") != "null"] or found


def _describe_any(nodes: Sequence[Json]) -> str:
    texts = list(dict.fromkeys(_describe(node) for node in nodes))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _describe(node: Json, *, is_plural: bool = False) -> str:
    choices = node.get("enum", [node["const"]] if "const" in node else [])
    if choices:
        texts = [json.dumps(choice) for choice in choices if choice is not None]
        return texts[0] if len(texts) == 1 else f"one of {', '.join(texts[:_MAX_CHOICES])}"
    kind = node.get("type", "")
    noun = _NOUNS.get(kind, ("any value", "values"))[is_plural]
    if kind in ("integer", "number"):
        return f"{noun}{_range_words(node)}"
    if kind == "string":
        matching = f" that matches {node['pattern']}" if "pattern" in node else ""
        return f"{noun}{_length_words(node, 'Length', 'characters')}{matching}"
    if kind == "array":
        return f"{noun}{_items_words(node)}{_length_words(node, 'Items', 'items')}"
    if _is_map(node):
        values = _describe(node["additionalProperties"], is_plural=True)
        return f"{noun} of {values}{_length_words(node, 'Properties', 'fields')}"
    return f"{noun}{_length_words(node, 'Properties', 'fields')}"


def _items_words(node: Json) -> str:
    items = node.get("items") or {}
    members = items.get("anyOf") or items.get("oneOf") or [items]
    if any("$ref" in member for member in members):
        return " of objects"
    texts = [_describe(member, is_plural=True) for member in members if member]
    return f" of {' or '.join(texts)}" if texts else ""


def _range_words(node: Json) -> str:
    least, most = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if below is not None and node["type"] == "integer":
        most, below = below - 1, None
    if least is not None and most is not None:
        return f" from {_number(least)} to {_number(most)}"
    bounds = (("of at least", least), ("above", above), ("at most" if above is not None else "of at most", most))
    parts = [f"{words} {_number(bound)}" for words, bound in (*bounds, ("below", below)) if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _length_words(node: Json, of: str, unit: str) -> str:
    least, most = node.get(f"min{of}"), node.get(f"max{of}")
    if least and most is not None:
        return f" ({least} to {most} {unit})"
    if most is not None:
        return f" (at most {most} {unit})" if most else " (empty)"
    return " (not empty)" if least == 1 else f" (at least {least} {unit})" if least else ""


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
