"""Grammars from what clients give: JSON schemas, regular expressions, choices and Lark.

All are written in llguidance's form. Nothing is compiled here: :mod:`.grammar_checker` does that, in a bounded process.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from splitserve.common.errors import SplitserveError
from splitserve.protocol.sampling_features import MAX_GRAMMAR_CHARS
from splitserve.router.text.schema_rewriting import rewritten

JsonSchema = Mapping[str, Any] | bool

_OPTIONS = "x-guidance"
_STRICT_OPTIONS: dict[str, Any] = {
    # White space between tokens of JSON is bounded: a model could emit it until its length ends the answer.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
}
_LENIENT_OPTIONS = _STRICT_OPTIONS | {"coerce_one_of": True, "lenient": True}


class GrammarError(SplitserveError):
    """A grammar or schema that can't constrain an answer."""


def json_schema_grammar(schema: JsonSchema, *, is_strict: bool = True) -> str:
    """Return the grammar of JSON values that ``schema`` allows. Raises :class:`GrammarError`.

    Without ``is_strict`` keywords that llguidance doesn't implement are left out of account; with it the grammar
    isn't compiled.
    """
    return bounded('{"grammars":[{"json_schema":' + schema_text(schema, is_strict=is_strict) + "}]}")


def json_object_grammar() -> str:
    """Return the grammar of all JSON objects."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that ``pattern`` (Rust's syntax, no look-around) matches as a whole."""
    return bounded(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of exactly these texts."""
    return bounded("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(text: str) -> str:
    """Return a grammar in Lark's syntax; one in GBNF (``root ::= ...``) is translated. Raises
    :class:`GrammarError`."""
    if text.lstrip().startswith("{"):  # llguidance's own JSON, whose options could switch our bounds off
        raise GrammarError("the grammar begins with {; give it in Lark's syntax (start: ...) or GBNF (root ::= ...)")
    if "::=" not in text:
        return bounded(text)
    bounded(text)
    try:
        return bounded(str(any_to_lark(text)))
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(f"the grammar isn't valid GBNF: {str(error)[:500]}") from error


def schema_text(schema: JsonSchema, *, is_strict: bool = True) -> str:
    """Return a JSON schema as it stands after ``%json`` in a grammar. Raises :class:`GrammarError`.

    Without ``is_strict`` numbers that can't be enforced are left out of account, too.
    """
    if isinstance(schema, bool):
        if not schema:
            raise GrammarError("the JSON schema is false, which no value satisfies")
        schema = {}
    if _OPTIONS in schema:
        raise GrammarError(f"the JSON schema has the keyword {_OPTIONS}, which is reserved")
    options = _STRICT_OPTIONS if is_strict else _LENIENT_OPTIONS
    try:
        bounded(_dumped(schema))  # before more is done with it
        return _dumped({**rewritten(dict(schema), GrammarError if is_strict else None), _OPTIONS: options})
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema isn't JSON: {error}") from error


def _dumped(schema: JsonSchema) -> str:
    return json.dumps(schema, separators=(",", ":"), allow_nan=False)


def bounded(grammar: str) -> str:
    """Return the grammar, or a part of one. Raises :class:`GrammarError` if it is longer than a worker takes."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    return grammar
