"""Text of :mod:`.settings` and :mod:`.parameters`: types of keyword arguments, made from the declarations that the
command line and the HTTP API are made of. ``python scripts/reference_pages.py`` writes them.
"""

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from splitserve.orchestration.python.keywords import keyword_actions

_NOTE = "Made by `python scripts/reference_pages.py`, not by hand."
_WIDTH = 120
# Fields that the client sets itself.
_OWN_FIELDS = frozenset({"model", "prompt", "messages", "stream", "stream_options", "return_token_ids"})
_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def settings_module() -> str:
    """Return the module with the settings of a cluster."""
    lines = [f'"""Settings of a cluster as keyword arguments. {_NOTE}"""', "", "import os"]
    fields = [(name, _kind_of(action), (action.help or "").replace("%%", "%")) for name, action in keyword_actions()]
    body = _typed_dict(
        "Settings", "Settings of a cluster: the options of `splitserve serve` without their dashes.", fields
    )
    return _module([*lines, *_imports(body)], body)


def parameters_module(schemas: Mapping[str, Any]) -> str:
    """Return the module with the parameters of requests. ``schemas``: those of the OpenAPI document."""
    lines = [f'"""Parameters of requests as keyword arguments. {_NOTE}"""', ""]
    completion, chat = (list(_fields(schemas[name])) for name in ("CompletionRequest", "ChatCompletionRequest"))
    common = [field for field in completion if field in chat]
    bodies = [
        _typed_dict("Parameters", "Parameters of both methods.", common),
        *(
            _typed_dict(name, words, [field for field in fields if field not in common], "Parameters")
            for name, words, fields in (
                ("CompletionParameters", "Parameters of `LLM.generate`.", completion),
                ("ChatParameters", "Parameters of `LLM.chat`.", chat),
            )
        ),
    ]
    return _module([*lines, *_imports("".join(bodies))], "\n\n".join(bodies))


def _module(head: Iterable[str], body: str) -> str:
    return "\n".join(head) + "\n\n\n" + body


def _imports(body: str) -> Iterator[str]:
    names = [name for name in ("Mapping", "Sequence") if f"{name}[" in body]
    if names:
        yield f"from collections.abc import {', '.join(names)}"
    yield f"from typing import {', '.join(name for name in ('Any', 'Literal', 'TypedDict') if name in body)}"


def _typed_dict(name: str, words: str, fields: Sequence[tuple[str, str, str]], base: str = "TypedDict") -> str:
    lines = [f"class {name}({base}, total=False):", f'    """{words}"""', *([""] if fields else [])]
    for field, kind, comment in fields:
        lines += textwrap.wrap(comment, _WIDTH, initial_indent="    # ", subsequent_indent="    # ")
        lines += _field(field, kind)
    return "\n".join(lines) + "\n"


def _field(name: str, kind: str) -> list[str]:
    line = f"    {name}: {kind}"
    if len(line) <= _WIDTH:
        return [line]
    return [
        f"    {name}: (",
        *(f"        {'| ' if index else ''}{part}" for index, part in enumerate(kind.split(" | "))),
        "    )",
    ]


# ---- options of the command line ----


def _kind_of(action: argparse.Action) -> str:
    """Return the type of the values of an option."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.choices is not None:
        return _literal(action.choices)
    if isinstance(action.default, list):
        return "str | Sequence[str]"
    if action.metavar == "SIZE":
        return "int | str"
    if isinstance(action.default, int | float):
        return type(action.default).__name__
    return "str | os.PathLike[str]" if action.metavar in ("PATH", "DIR", "FILE") else "str"


def _literal(values: Iterable[Any]) -> str:
    return "Literal[" + ", ".join(f'"{each}"' if isinstance(each, str) else repr(each) for each in values) + "]"


# ---- fields of the HTTP API ----


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, value in schema["properties"].items():
        words = value.get("description", "")
        if name not in _OWN_FIELDS and "neutral values only" not in words:
            yield name, _type_of(value), ""


def _type_of(value: Mapping[str, Any]) -> str:
    """Return the Python type of a JSON schema. Parts with a schema of their own are mappings."""
    if members := value.get("anyOf") or value.get("oneOf"):
        return " | ".join(dict.fromkeys(part for each in members for part in _type_of(each).split(" | ")))
    if "enum" in value or "const" in value:
        return _literal(value.get("enum", [value.get("const")]))
    match value.get("type"):
        case "array":
            return f"Sequence[{_type_of(value.get('items', {}))}]"
        case "object" if isinstance(value.get("additionalProperties"), Mapping):
            kind = _type_of(value["additionalProperties"])
            return f"Mapping[int, {kind}] | Mapping[str, {kind}]"
        case str() as kind if kind in _SIMPLE:
            return _SIMPLE[kind]
    return "Mapping[str, Any]" if "$ref" in value or value.get("type") == "object" else "Any"
