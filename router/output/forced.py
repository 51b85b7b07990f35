"""Grammars of outputs that must call a tool, in llguidance's Lark: for ``tool_choice`` required, or a named function.

A grammar covers the whole output, with the reasoning that comes before the calls. Nothing is compiled here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from splitserve.common.errors import SplitserveError
from splitserve.protocol.sampling_features import MAX_GRAMMAR_CHARS
from splitserve.router.output.template import ForcedCall
from splitserve.router.text.grammars import GrammarError


class SchemaText(Protocol):
    """Function that writes a JSON schema as a grammar has it; if not strict, what can't be enforced is left out."""

    def __call__(self, schema: Mapping[str, Any], *, is_strict: bool) -> str: ...


_PLACEHOLDERS = re.compile(r"(\{(?:name|number|arguments|key|value)\})")
_ANY_SCHEMA: dict[str, Any] = {"type": "object"}
_TEXT = "TEXT: /(?s:.*)/"


class Reasoning(Enum):
    """The reasoning that an output begins with."""

    NONE = auto()
    OPTIONAL = auto()  # the model opens it, or doesn't
    OPEN = auto()  # the prompt has opened it


class ForcedCalls:
    """Grammars for one form of calls. ``token_ids``: the added tokens of the vocabulary, which no text stands for."""

    def __init__(self, form: ForcedCall, token_ids: Mapping[str, int], schema_text: SchemaText) -> None:
        self._form = form
        self._token_ids = token_ids
        self._schema_text = schema_text
        names = sorted(token_ids, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def grammar(self, functions: Sequence[Mapping[str, Any]], reasoning: Reasoning, *, is_parallel: bool) -> str:
        """Return the grammar of one call of one of ``functions``, or several calls if ``is_parallel``.

        A function has ``name`` and perhaps ``parameters``, a JSON schema. Raises :class:`GrammarError` for a schema
        that can't be enforced; the function's name begins its message.
        """
        form = self._form
        rules: list[str] = []
        several = ""
        if is_parallel and form.separator is not None:
            several = f"( {self._literal(form.separator)} call )*"
        parts = [self._reasoning(reasoning, rules), self._literal(form.begin), "call", several, self._literal(form.end)]
        calls = [self._named_call(index, function, rules) for index, function in enumerate(functions)]
        lines = [f"start: {_joined(parts)}", f"call: {' | '.join(calls)}", *rules]
        text = "\n".join([*lines, _TEXT] if any("TEXT" in line for line in lines) else lines) + "\n"
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                f"the grammar of the calls of {len(functions)} functions has {len(text)} characters; at most "
                f"{MAX_GRAMMAR_CHARS} are allowed: name one function in tool_choice, or give fewer or shorter schemas"
            )
        return text

    def after_reasoning(self, grammar: str, reasoning: Reasoning) -> str:
        """Return the grammar of an answer by ``grammar``, in Lark or in llguidance's JSON, after free reasoning."""
        rules: list[str] = []
        begin = _joined([self._reasoning(reasoning, rules), self._literal(self._form.answer_begin)])
        if not begin:
            return grammar
        inner = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
        inner["grammars"][0]["name"] = "answer"
        lark = "\n".join([f"start: {begin} @answer", *rules, _TEXT]) + "\n"
        return json.dumps({**inner, "grammars": [{"lark_grammar": lark}, *inner["grammars"]]}, separators=(",", ":"))

    def _reasoning(self, reasoning: Reasoning, rules: list[str]) -> str:
        form = self._form
        if reasoning is Reasoning.NONE or not form.reasoning_close:
            return ""
        text = self._text_until("thought", form.reasoning_close, rules)
        return text if reasoning is Reasoning.OPEN else f"( {_joined([self._literal(form.reasoning_open), text])} )?"

    def _named_call(self, index: int, function: Mapping[str, Any], rules: list[str]) -> str:
        try:
            return self._call(index, function, rules)
        except SplitserveError as error:
            raise type(error)(f"function {function['name']}: {error}") from error

    def _call(self, index: int, function: Mapping[str, Any], rules: list[str]) -> str:
        schema = function.get("parameters") or _ANY_SCHEMA
        is_strict = bool(function.get("strict"))
        parts = []
        for piece in _PLACEHOLDERS.split(self._form.call):
            if piece == "{name}":
                parts.append(self._literal(function["name"]))
            elif piece == "{number}":
                parts.append("/[0-9]{1,3}/")
            elif piece == "{arguments}" and self._form.tag:
                parts.append(self._tags(index, schema, rules, is_strict=is_strict))
            elif piece == "{arguments}":
                rules.append(f"arguments_{index}: %json {self._schema_text(schema, is_strict=is_strict)}")
                parts.append(f"arguments_{index}")
            else:
                parts.append(self._literal(piece))
        rules.append(f"call_{index}: {_joined(parts)}")
        return f"call_{index}"

    def _tags(self, index: int, schema: Mapping[str, Any], rules: list[str], *, is_strict: bool) -> str:
        """Return a term for each property of the schema, in its order; those that aren't required may be left out."""
        terms = []
        properties, required = _properties(schema)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for number, (key, subschema) in enumerate(properties.items()):
            name = f"tag_{index}_{number}"
            before, _, after = (part.replace("{key}", key) for part in self._form.tag.partition("{value}"))
            if (choices := _choices(subschema)) is not None:
                value = f"( {' | '.join(self._literal(text) or json.dumps('') for text in choices)} )"
                value = _joined([value, self._literal(after)])
            elif isinstance(subschema, bool) or (_may_be_text(subschema) and "enum" not in subschema):
                value = self._text_until(f"{name}_text", after, rules)
            else:
                rules.append(f"{name}_json: %json {self._schema_text({**subschema, **shared}, is_strict=is_strict)}")
                value = _joined([f"{name}_json", self._literal(after)])
            rules.append(f"{name}: {_joined([self._literal(before), value])}")
            terms.append(name if key in required else f"{name}?")
        return " ".join(terms)

    def _text_until(self, name: str, end: str, rules: list[str]) -> str:
        """Return the term of any text up to and with ``end``."""
        pieces = self._pieces(end)
        if isinstance(pieces[0], int):
            return _joined(["TEXT", self._literal(end)])
        rules.append(f"{name}[suffix={json.dumps(pieces[0])}]: TEXT")
        return _joined([name, *map(_term, pieces[1:])])

    def _literal(self, text: str) -> str:
        return _joined([_term(piece) for piece in self._pieces(text)])

    def _pieces(self, text: str) -> list[str | int]:
        """Return the text with its added tokens as ids."""
        split = [text] if self._added is None else self._added.split(text)
        return [self._token_ids.get(piece, piece) for piece in split if piece]


def rule_function_index(line: str) -> int | None:
    """Return the index of the function whose schema is in a line of a grammar of calls; None if it has none."""
    found = re.match(r"(?:arguments|tag)_(\d+)", line)
    return None if found is None else int(found[1])


def _term(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)


def _joined(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)


def _properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the properties of an object's schema, and the names of those that it requires. Raises
    :class:`GrammarError`."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping | None):
        raise GrammarError(f"properties must be an object of JSON schemas, got {_shown(properties)}")
    for key, subschema in (properties or {}).items():
        if not isinstance(subschema, Mapping | bool):
            got = _shown(subschema)
            raise GrammarError(f"the schema of property {_shown(key)} must be an object, true or false, got {got}")
    if required is not None and not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise GrammarError(f"required must be a list of names of properties, got {_shown(required)}")
    return properties or {}, required or ()


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:80]
    except RecursionError:
        return "a deeply nested value"


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a property's value is written as it is, and not as JSON."""
    kind = schema.get("type", "string")
    return "string" in (kind if isinstance(kind, list) else [kind])


def _choices(schema: Any) -> list[str] | None:
    """Return the texts of the only values that a property may have, if some are written as they are; else None."""
    if not isinstance(schema, Mapping) or not _may_be_text(schema):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not values or any(isinstance(value, dict | list) for value in values):
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]
