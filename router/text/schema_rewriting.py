"""JSON schemas rewritten where llguidance would not enforce them as they stand.

llguidance holds numbers as float64, and reads long ones inexactly; it lets the border of some exclusive ranges through,
and takes alternatives of ``oneOf`` with different numbers for overlapping ones.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

MAX_NUMBER = 1 << 53  # integers up to here are exact in float64
_MAX_PLACES = 22  # llguidance reads a decimal exactly if its digits and this power of ten are exact in float64
_NUM_DIGITS = 15
_ALLOWED = f"use at most {_NUM_DIGITS} digits, and numbers between {-MAX_NUMBER} and {MAX_NUMBER}"
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

Schema = dict[str, Any]
Refusal = Callable[[str], Exception]


def rewritten(schema: Schema, refusal: Refusal | None) -> Schema:
    """Return a schema that llguidance enforces, of the same values but for numbers very close to an excluded one.

    A keyword whose number can't be enforced raises ``refusal(message)``; with None, for a schema that isn't strict, it
    is left out.
    """
    found = {key: _rewritten_in(key, value, refusal) for key, value in schema.items()}
    for key in [*_BOUNDS, "const", "enum"]:
        if (number := _unenforceable(found.get(key))) is not None:
            if refusal is not None:
                raise refusal(f"{key} has {_shown(number)}, which can't be enforced; {_ALLOWED}, or leave {key} out")
            del found[key]
    if refusal is not None and "anyOf" not in found and _are_alternatives(schema):
        found = {"anyOf" if key == "oneOf" else key: value for key, value in found.items()}
    return _with_inclusive_bounds(found)


def _rewritten_in(key: str, value: Any, refusal: Refusal | None) -> Any:
    """Return the value of a keyword with the schemas in it rewritten."""
    if key in _VALUES:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: _rewritten_in("", each, refusal) for name, each in value.items()}
    if isinstance(value, list):
        return [_rewritten_in("", each, refusal) for each in value]
    return rewritten(value, refusal) if isinstance(value, dict) else value


def _unenforceable(value: Any) -> int | float | None:
    """Return a number in a value of JSON that can't be enforced; None if there is none."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return next((number for number in map(_unenforceable, inside) if number is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if abs(value) <= MAX_NUMBER and _is_read_exactly(value) else value


def _is_read_exactly(number: float) -> bool:
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return isinstance(exponent, int) and exponent >= -_MAX_PLACES and int("".join(map(str, digits))) <= MAX_NUMBER


def _with_inclusive_bounds(schema: Schema) -> Schema:
    """Return a schema in which integers that exclude numbers towards 0, and themselves, exclude them alone.

    A grammar of the numbers above 0 and up to 0.5 would allow 0; one of the numbers from 0.00000000000001 on doesn't.
    """
    found = dict(schema)
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound: Any = found.get(exclusive)
        if isinstance(bound, bool):  # of draft 4
            bound = found.pop(inclusive, None) if bound else None
            del found[exclusive]
            if _is_number(bound):
                found[exclusive] = bound
        if not _is_number(bound) or sign * bound < 0 or bound != int(bound):
            continue
        next_number = _next_short(bound, sign)
        given = found.get(inclusive, next_number)
        found[inclusive] = sign * max(sign * next_number, sign * given) if _is_number(given) else given
        del found[exclusive]
    return found


def _are_alternatives(schema: Schema) -> bool:
    """Return whether certainly no value satisfies two of a schema's ``oneOf``."""
    alternatives = schema.get("oneOf")
    shared = {"type": schema["type"]} if "type" in schema else {}
    if not isinstance(alternatives, list):
        return False
    return _exclude_each_other([shared | each if isinstance(each, dict) else each for each in alternatives])


def _exclude_each_other(schemas: Sequence[Any]) -> bool:
    """Return whether certainly no value satisfies two of these schemas. Takes time in proportion to their size."""
    by_type: dict[str, list[Schema]] = {}
    for each in schemas:
        types = _types(each) if isinstance(each, dict) else set()
        if not types:
            return False
        for name in types:
            by_type.setdefault(name, []).append(each)
    rules = {"number": _are_apart, "object": _differ_in_a_property}
    return all(
        len(group) == 1 or _are_distinct(group) or (name in rules and rules[name](group))
        for name, group in by_type.items()
    )


def _are_distinct(schemas: Sequence[Schema]) -> bool:
    """Return whether the schemas name all their values, and none of them twice."""
    values = [each for each in map(_scalars, schemas) if each is not None]
    return len(values) == len(schemas) and sum(map(len, values)) == len(set().union(*values))


def _are_apart(numbers: Sequence[Schema]) -> bool:
    """Return whether no number is in the ranges of two of these schemas."""
    ranges = sorted((_end(each, "minimum"), _end(each, "maximum")) for each in numbers)
    return all(highest < lowest for (_, highest), (lowest, _) in pairwise(ranges))


def _differ_in_a_property(objects: Sequence[Schema]) -> bool:
    """Return whether the schemas of some property, which all these objects must have, exclude each other."""
    properties = [each["properties"] for each in objects if isinstance(each.get("properties"), dict)]
    if len(properties) != len(objects):
        return False
    required = [set(_strings(each.get("required"))) for each in objects]
    names = set.intersection(*required, *map(set, properties))
    return any(_exclude_each_other([each[name] for each in properties]) for name in names)


def _scalars(schema: Schema) -> set[tuple[bool, Any]] | None:
    """Return the only values that a schema may allow, True apart from 1; None unless it names them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return {(isinstance(value, bool), value) for value in values}


def _types(schema: Schema) -> set[str]:
    """Return the types of a schema's values; integers are numbers. Empty if it names none."""
    if (values := _scalars(schema)) is not None:
        return {_type_of(value) for _, value in values}
    return {"number" if each == "integer" else each for each in _strings(schema.get("type"))}


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _end(schema: Schema, name: str) -> float:
    """Return the least (``minimum``) or the greatest number that a schema may allow."""
    is_least = name == "minimum"
    if values := _scalars(schema):
        numbers: list[float] = [value for _, value in values if _is_number(value)]
        return min(numbers) if is_least else max(numbers)
    exclusive: Any = schema.get("exclusiveMinimum" if is_least else "exclusiveMaximum")
    ends: list[float] = [schema[name]] if _is_number(schema.get(name)) else []
    if _is_number(exclusive):
        ends.append(math.nextafter(exclusive, math.inf if is_least else -math.inf))
    return max(ends, default=-math.inf) if is_least else min(ends, default=math.inf)


def _next_short(integer: float, sign: int) -> float:
    """Return the next number of 15 digits above an integer, or below it: 1e-14 and -1e-14 for 0."""
    number = Decimal(int(integer))
    step = sign * Decimal(1).scaleb(number.adjusted() + 1 - _NUM_DIGITS)
    found = number + step
    return int(found) if found == int(found) else float(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: int | float) -> str:
    text = str(value) if isinstance(value, float) or value.bit_length() < 200 else "a number of more than 60 digits"
    return text[:80]
