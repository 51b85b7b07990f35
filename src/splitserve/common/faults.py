"""Faults of documents that people write, in words: where, what is allowed, and what was given."""

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

_STEP = re.compile(r"(\w+)|\[(\d+)\]")


def words_of_fault(
    message: str, document: Any, fields_at: Callable[[str], Sequence[str]], *, hidden: str = "", root: str = "it"
) -> str:
    """Return the message of msgspec's ValidationError with the value that is wrong.

    ``fields_at``: the fields that are allowed at a location, like ``tenants[0]``, "" for the whole ``document``, which
    is called ``root``. A list or a mapping is not shown, since it may hold secrets, nor is a value where the location
    contains ``hidden``.
    """
    text, _, location = message.partition(" - at `$")
    location = location.strip("`.")
    text, name = text[:1].lower() + text[1:].replace("`", ""), location or root
    if text.startswith("object contains unknown field"):
        allowed = ", ".join(fields_at(location))
        return f"{name} {text.removeprefix('object ')}; {f'there are {allowed}' if allowed else 'there are none'}"
    if "missing" in text or ", got " in text or (hidden and hidden in location):
        return f"{name}: {text}"
    value = document
    for field, index in _STEP.findall(location):
        value = value[int(index)] if index else value[field]
    if isinstance(value, dict | list):
        return f"{name}: {text}"
    return f"{name}: {text}, got {reprlib.repr(value)}"
