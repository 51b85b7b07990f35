"""Constraints in bodies: ``response_format`` as OpenAI has it, ``structured_outputs`` as vLLM has it."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from splitserve.protocol.sampling_features import MAX_GRAMMAR_CHARS
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.bodies.shape import check_shape
from splitserve.router.text.grammars import (
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

MAX_CHOICES = 1024
MAX_NAME_CHARS = 64

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class JsonSchemaFormat(_Part):
    """A JSON schema for the answer. ``strict: false`` leaves keywords that can't be enforced out of account."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Part):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Part):
    """Exactly one constraint."""

    json_: Annotated[dict[str, Any] | bool | GrammarText | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: GrammarText | None = None


def requested_grammar(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> tuple[str, str] | None:
    """Return the grammar that a body asks for, and the field that does; None for neither.

    Raises :class:`ApiError` 400 that names the field.
    """
    has_format = response_format is not None and response_format.type != "text"
    if has_format and structured_outputs is not None:
        message = "response_format and structured_outputs both constrain the answer: give one of them"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    if structured_outputs is not None:
        return _of_structured_outputs(structured_outputs)
    return None if response_format is None else _of_response_format(response_format)


def _of_response_format(wanted: ResponseFormat) -> tuple[str, str] | None:
    given = wanted.json_schema
    if wanted.type != "json_schema":
        if given is not None:
            message = f"response_format.json_schema is only allowed with type json_schema, got type {wanted.type}"
            raise ApiError(400, message, param="response_format.json_schema", code="invalid_value")
        return None if wanted.type == "text" else (json_object_grammar(), "response_format")
    if given is None:
        message = "response_format.json_schema is missing; type json_schema needs it"
        raise ApiError(400, message, param="response_format.json_schema", code="invalid_value")
    schema = {} if given.schema_ is None else given.schema_
    field = "response_format.json_schema.schema"
    try:
        return json_schema_grammar(schema, is_strict=given.strict is not False), field
    except GrammarError as error:
        raise refused(field, error) from None


def _of_structured_outputs(wanted: StructuredOutputs) -> tuple[str, str]:
    given = {
        "json": wanted.json_,
        "json_object": wanted.json_object,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        message = (
            f"structured_outputs must have exactly one of {', '.join(given)}; it has {' and '.join(names) or 'none'}"
        )
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    name = names[0]
    field = f"structured_outputs.{name}"
    try:
        return _grammar(name, given[name], field), field
    except GrammarError as error:
        raise refused(field, error) from None


def _grammar(name: str, value: Any, field: str) -> str:
    match name:
        case "json":
            return json_schema_grammar(_parsed(value, field) if isinstance(value, str) else value)
        case "json_object":
            return json_object_grammar()
        case "regex":
            return regex_grammar(value)
        case "choice":
            return choice_grammar(value)
        case _:
            return lark_grammar(value)


def _parsed(text: str, field: str) -> Any:
    """Return the schema in a string, within the bounds of a body."""
    check_shape(text.encode())
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{field} isn't valid JSON: {error}", param=field, code="invalid_value") from None
    if not isinstance(schema, dict | bool):
        message = f"{field} must be a JSON schema, an object or true; it is a {type(schema).__name__}"
        raise ApiError(400, message, param=field, code="invalid_value")
    return schema


def refused(field: str, error: GrammarError, function: str = "") -> ApiError:
    """Return the error for a grammar that can't be used; it names the keywords that aren't supported, and the
    ``function`` whose schema has them."""
    text = str(error)
    if text.startswith("Unimplemented keys: "):
        keywords = text.removeprefix("Unimplemented keys: ").strip("[]").replace('"', "")
        text = f"these JSON schema keywords can't be enforced: {keywords}; leave them out"
        if field.startswith("response_format"):
            text += ", or send strict: false, which ignores them"
        elif function:
            text += ", or send the function without strict, which ignores them"
    elif text.startswith("oneOf constraints are not supported"):
        text = (
            "oneOf is supported only where its alternatives exclude each other: by type, by const or enum, by range of "
            "numbers, or by a property that all of them require and that differs so; use anyOf"
        )
    where = f"function {function}: " if function else ""
    return ApiError(400, f"{field} can't be used: {where}{text}", param=field, code="unsupported_grammar")
