"""HTTP requests with random mixes of all registered sampling features. Not a test module."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from feature_examples import TYPES, example_value
from splitserve.benchmarks.chaos.load import VOCABULARY, Answer, Case
from splitserve.protocol.sampling_features import NEUTRAL_VALUES

PROMPT_LENGTHS = (1, 17, 40, 64, 120, 300)
NUM_TOKENS = (4, 16, 48, 96)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
    {"structured_outputs": {"json": {"type": "array", "items": PERSON, "minItems": 3}}},
    {"structured_outputs": {"regex": r"[a-f]{3}-\d{2,4}( the)*"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps tomorrow"]}},
    {"structured_outputs": {"grammar": 'start: item ("," item)*\nitem: "a" | "b" item | "(" start ")"'}},
    {"response_format": {"type": "json_object"}},
)
WORDS = ("the", " the", "and", " of", "to", " in", "er", "on", "a", " token")


@dataclass(frozen=True, slots=True)
class StormCase:
    """A request, and the names of its features."""

    case: Case
    features: tuple[str, ...]


def _bounded(name: str) -> Callable[[random.Random], dict[str, Any]]:
    """Return a maker of the parameter as the HTTP API has it: by its own name, token ids as strings where keys are."""

    def make(chance: random.Random) -> dict[str, Any]:
        value = example_value(TYPES[name], chance, VOCABULARY.stop)
        return {name: {str(key): each for key, each in value.items()} if isinstance(value, dict) else value}

    return make


# Parameters that clients spell otherwise than workers do, or whose range is too wide to be of use.
_OTHERS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "constraint": lambda chance: chance.choice(CONSTRAINTS),
    "bad_words": lambda chance: {"bad_words": chance.sample(WORDS, 4)},
    "repetition_penalty": lambda chance: {"repetition_penalty": round(chance.uniform(0.8, 2.0), 3)},
    "min_tokens": lambda chance: {"min_tokens": chance.randint(1, 4)},
    "min_p": lambda chance: {"min_p": round(chance.uniform(0.01, 0.5), 3)},
    "allowed_token_ids": lambda chance: {"allowed_token_ids": chance.sample(VOCABULARY, 400)},
}
# What the router does by itself.
_TEXT: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "stop": lambda chance: {"stop": chance.sample(("e", " th", "er ", ". ", "xyz"), 2)},
    "include_stop_str_in_output": lambda chance: {"stop": ["ing", "an"], "include_stop_str_in_output": True},
    "skip_special_tokens": lambda chance: {"skip_special_tokens": False},
    "stop_token_ids": lambda chance: {"stop_token_ids": chance.sample(VOCABULARY, 5)},
    "sampled": lambda chance: {
        "temperature": chance.choice((0.7, 1.0, 1.5)),
        "top_k": chance.choice((0, 50)),
        "top_p": chance.choice((1.0, 0.9)),
    },
}
FEATURES = {name: _OTHERS.get(name) or _bounded(name) for name in NEUTRAL_VALUES} | _TEXT


def storm_cases(model: str, first: int, count: int) -> list[StormCase]:
    """Return requests number ``first`` and following: each depends on its number alone."""
    return [_storm_case(model, number) for number in range(first, first + count)]


def _storm_case(model: str, number: int) -> StormCase:
    chance = random.Random(number)
    share = chance.choice((0.2, 0.4, 0.6, 0.8))
    names = tuple(name for name in FEATURES if chance.random() < share)
    body: dict[str, Any] = {
        "model": model, "prompt": chance.choices(VOCABULARY, k=chance.choice(PROMPT_LENGTHS)), "seed": number,
        "max_tokens": chance.choice(NUM_TOKENS), "temperature": 0, "stream": True, "return_route": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    for name in names:
        body |= FEATURES[name](chance)
    return StormCase(Case(f"storm-{number}", body), names)


def check_document(case: Case, answer: Answer) -> None:
    """Check that a text that ended by itself satisfies the schema that its request has, unless a stop string cut it."""
    if answer.finish_reason != "stop" or "stop" in case.body or "stop_token_ids" in case.body:
        return
    if "response_format" in case.body:
        wanted = case.body["response_format"]
        schema = wanted.get("json_schema", {}).get("schema", {"type": "object"})
    else:
        schema = case.body.get("structured_outputs", {}).get("json")
    if schema is not None:
        jsonschema.validate(json.loads(answer.text), schema)
