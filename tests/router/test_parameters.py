"""Every parameter of the generating endpoints, from its declaration: at, below and above each bound, wrong types.

The cases follow from the schema that clients see; a new parameter is tested once it is declared.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from splitserve.router.http.api_error import ApiError
from splitserve.router.http.endpoints.generate import GenerateRequest
from splitserve.router.http.endpoints.messages_body import CountRequest, MessagesRequest
from splitserve.router.http.endpoints.responses_body import ResponsesRequest
from splitserve.router.http.endpoints.tokens import DetokenizeRequest, TokenizeRequest
from splitserve.router.http.meanings import MEANINGS
from splitserve.router.http.openapi import openapi_document
from splitserve.router.http.parsing import parse
from splitserve.router.http.schema import NEUTRAL_ONLY, ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "a"}]
MODELS: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": MESSAGES},
    GenerateRequest: {"token_ids": [1]},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
TOOL = {"type": "function", "function": {"name": "x"}}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "max_tokens": {"prompt_logprobs": 1},  # with which 0 is allowed
    "max_completion_tokens": {"prompt_logprobs": 1},
}
"""Parameters without which another one makes no sense."""
BESIDE_IN_CHATS: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
SAMPLES: dict[str, list[Any]] = {
    "string": ["text", ""],
    "integer": [1, -7, 10**30],
    "number": [0.5, -0.5],
    "boolean": [True, False],
    "array": [[{"odd": [[]]}]],
    "object": [{"odd": 1}],
}
"""Values of each JSON type; none of the lists and objects fits any parameter with declared elements."""
RAW_WORDS = ("Input should", "valid string", "validation", "Value error", "pydantic", "type=")


class Case(NamedTuple):
    model: Any
    name: str
    value: Any
    is_allowed: bool

    def __str__(self) -> str:
        value = json.dumps(self.value, default=str)
        shown = value if len(value) <= 24 else f"{value[:20]}..{len(value)}"
        return f"{self.model.__name__[:4]}-{self.name}-{shown}-{'ok' if self.is_allowed else 'no'}"


def resolve(node: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return resolve(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    members = node.get("anyOf") or node.get("oneOf")
    return [each for member in members for each in resolve(member, definitions)] if members else [node]


def bound_cases(node: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at and beyond the bounds of one form of a parameter."""
    kind = node.get("type")
    if kind in ("integer", "boolean") and "const" in node:
        yield (not node["const"] if kind == "boolean" else node["const"] + 1), False
    step = 1 if kind == "integer" else 1e-6
    if kind in ("integer", "number"):
        for bound, sign in (("minimum", -1), ("maximum", 1)):
            if bound in node:
                yield node[bound], True
                yield node[bound] + sign * step, False
        for bound, sign in (("exclusiveMinimum", -1), ("exclusiveMaximum", 1)):
            if bound in node:
                yield node[bound], False
                yield node[bound] - sign * step, True
    if kind == "string":
        if "maxLength" in node:
            yield "x" * node["maxLength"], True
            yield "x" * (node["maxLength"] + 1), False
        yield from ((choice, True) for choice in node.get("enum", []))
        if node.get("enum"):
            yield "no such choice", False
    if kind == "array" and "maxItems" in node:
        element = element_of(node, definitions)
        items = [distinct(element, number) for number in range(node["maxItems"] + 1)]
        yield items[:-1], True
        yield items, False


def distinct(element: Any, number: int) -> Any:
    """A tool with a name of its own; anything else as it is."""
    is_tool = isinstance(element, dict) and "function" in element
    return element | {"function": element["function"] | {"name": f"f{number}"}} if is_tool else with_content(element)


def with_content(element: Any) -> Any:
    """A message with content, which only some may leave out."""
    return {"role": "user", "content": "a"} if isinstance(element, dict) and "role" in element else element


def element_of(node: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """An element that a list of this form takes."""
    return sample_of(node.get("items", {}), definitions)


def sample_of(node: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """A value of this form, with the required fields of objects only."""
    form = resolve(node, definitions)[0]
    if "const" in form or "enum" in form:
        return form.get("const", form.get("enum", [None])[-1])
    match form.get("type"):
        case "integer" | "number":
            return form.get("minimum", 1)
        case "string":
            return "x"
        case "array":
            return [element_of(form, definitions)]
        case "object":
            required = form.get("required", ())
            return {name: sample_of(form["properties"][name], definitions) for name in required}
    return 1


def fits(value: Any, nodes: list[dict[str, Any]]) -> bool | None:
    """Return whether a sample of a type surely fits (None: it depends on more than the type)."""
    kinds = {node.get("type") for node in nodes}
    choices = [choice for node in nodes for choice in node.get("enum", [node["const"]] if "const" in node else [])]
    if choices:
        return None if value in choices or len(choices) < len(nodes) else False
    if None in kinds:  # any value
        return None
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return None if kinds & {"integer", "number"} else False
    if isinstance(value, float):
        return None if "number" in kinds else False
    if isinstance(value, str):
        return None if "string" in kinds else False
    return None if ("array" if isinstance(value, list) else "object") in kinds else False


def cases() -> Iterator[Case]:
    for model in MODELS:
        schema = model.model_json_schema()
        definitions = schema.get("$defs", {})
        for name, node in schema["properties"].items():
            nodes = resolve(node, definitions)
            for form in nodes:
                yield from (Case(model, name, value, ok) for value, ok in bound_cases(form, definitions))
            for value in (value for values in SAMPLES.values() for value in values):
                if (allowed := fits(value, nodes)) is not None:
                    yield Case(model, name, value, allowed)
            is_optional = any(form.get("type") == "null" for form in nodes)
            if is_optional or name in schema.get("required", ()):
                yield Case(model, name, None, is_optional)


def body_with(case: Case) -> bytes:
    others = BESIDE | BESIDE_IN_CHATS if case.model is ChatCompletionRequest else BESIDE
    return json.dumps({**MODELS[case.model], **others.get(case.name, {}), case.name: case.value}).encode()


CASES = list(cases())


@pytest.mark.parametrize(
    ("model", "name"), sorted({case[:2] for case in CASES}, key=str), ids=lambda part: getattr(part, "__name__", part)
)
def test_each_parameter_takes_its_values_and_no_others(model: Any, name: str):
    for case in CASES:
        if case[:2] == (model, name):
            check(case)


def check(case: Case) -> None:
    """Check that the value is taken, or refused in words of ours; an assertion that fails names the case."""
    if case.is_allowed:
        parse(case.model, body_with(case))
        return
    with pytest.raises(ApiError) as caught:
        parse(case.model, body_with(case))
    error = caught.value
    assert error.status == 400 and str(error.param).startswith(case.name), str(case)
    assert case.name in error.message and len(error.message) < 600, str(case)
    assert not any(words in error.message for words in RAW_WORDS), error.message
    if case.value is not None and not isinstance(case.value, str | list | dict):
        assert json.dumps(case.value) in error.message, "the message shows what was given"


def test_the_cases_reach_every_parameter_from_both_sides():
    by_name: dict[tuple[Any, str], set[bool]] = {}
    for case in CASES:
        by_name.setdefault((case.model, case.name), set()).add(case.is_allowed)
    for model in MODELS:
        for name in model.model_fields:
            assert False in by_name.get((model, name), set()), f"no wrong value of {name} is tried"
    assert len(CASES) > 300


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest, GenerateRequest])
def test_no_number_is_infinite(model, value):
    names = [name for name, node in model.model_json_schema()["properties"].items() if "number" in json.dumps(node)]
    assert "temperature" in names
    for name in names:
        with pytest.raises(ApiError) as caught:
            parse(model, body_with(Case(model, name, value, False)))
        assert name in str(caught.value.param) or caught.value.code == "invalid_json"


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("name", sorted(NEUTRAL_ONLY))
def test_parameters_without_support_take_neutral_values_only(model, name):
    if name in model.model_fields:
        return
    for neutral in (None, *NEUTRAL_ONLY[name]):
        parse(model, body_with(Case(model, name, neutral, True)))
    for value in (value for values in SAMPLES.values() for value in values):
        if value not in NEUTRAL_ONLY[name] or isinstance(value, bool):
            if any(value is neutral for neutral in NEUTRAL_ONLY[name]):
                continue
            with pytest.raises(ApiError) as caught:
                parse(model, body_with(Case(model, name, value, False)))
            assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
            assert "leave it out" in caught.value.message


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (CompletionRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CompletionRequest, {"stream": False, "stream_options": {}}, "stream_options"),
        (ChatCompletionRequest, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ],
)
def test_combinations_that_make_no_sense(model, fields, param):
    with pytest.raises(ApiError) as caught:
        parse(model, json.dumps(MODELS[model] | fields).encode())
    assert caught.value.status == 400 and caught.value.param == param


def test_each_parameter_has_a_meaning():
    models = [*MODELS, ResponsesRequest, MessagesRequest, CountRequest]
    schemas = openapi_document(["m"], wants_key=False)["components"]["schemas"]
    for model in models:
        properties = schemas[model.__name__]["properties"]
        assert not [name for name in model.model_fields if not properties[name]["description"]]
    names = {name for model in models for name in model.model_fields}
    assert not [name for name in MEANINGS if name not in names], "a meaning without a parameter"
