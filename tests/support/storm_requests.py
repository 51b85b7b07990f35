"""HTTP requests with random mixes of all features: sampling, text, log-probabilities, chats. Not a test module."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from feature_examples import TYPES, example_value
from splitserve.benchmarks.chaos.load import VOCABULARY
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.protocol.sampling_features import NEUTRAL_VALUES

PROMPT_LENGTHS = (1, 17, 40, 64, 120, 300)
NUM_TOKENS = (8, 32, 64, 96)
MAX_CHAT_WORDS = 120  # the tools and the roles take further tokens
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


TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "boolean"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call></tool_call>\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
END_OF_REASONING_BIAS = 11.0  # with it random weights end their reasoning after some tokens


def write_storm_model(directory: Path) -> Path:
    """Write a demo checkpoint with tokens and a chat template for reasoning and tool calls. Returns ``directory``."""
    write_demo_model(directory, architecture="qwen3")
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(list(ADDED_TOKENS))
    tokenizer.save(str(path))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


@dataclass(frozen=True, slots=True)
class StormCase:
    """A request, and the names of its features."""

    name: str
    path: str
    body: dict[str, Any]
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
# Log-probabilities, and parts of chats.
_ANSWERS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "n": lambda chance: {"n": chance.randint(2, 3)},
    "logprobs": lambda chance: {"logprobs": chance.randint(0, 3)},
    "prompt_logprobs": lambda chance: {"prompt_logprobs": chance.randint(0, 2)},
    "tools": lambda chance: {
        "tools": [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()],
        "tool_choice": chance.choice(
            ("auto", "required", "required", {"type": "function", "function": {"name": "weather"}})
        ),
        "parallel_tool_calls": chance.random() < 0.5,
    },
    "reasoning": lambda chance: {"enable_thinking": chance.random() < 0.8},
}
FEATURES = {name: _OTHERS.get(name) or _bounded(name) for name in NEUTRAL_VALUES} | _TEXT | _ANSWERS


def storm_cases(model: Path, first: int, count: int) -> list[StormCase]:
    """Return requests number ``first`` and following: each depends on its number alone."""
    end_of_reasoning = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("</think>")
    return [_storm_case(model.name, number, end_of_reasoning) for number in range(first, first + count)]


def _storm_case(model: str, number: int, end_of_reasoning: int) -> StormCase:
    chance = random.Random(number)
    share = chance.choice((0.4, 0.5, 0.6, 0.7, 0.8))
    names = tuple(name for name in FEATURES if chance.random() < share)
    if {"n", "prompt_logprobs"} <= set(names):  # the router refuses them together
        left_out = chance.choice(("n", "prompt_logprobs"))
        names = tuple(name for name in names if name != left_out)
    body: dict[str, Any] = {
        "model": model, "seed": number, "max_tokens": chance.choice(NUM_TOKENS), "temperature": 0, "stream": True,
        "return_route": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    for name in names:
        body |= FEATURES[name](chance)
    num_prompt_tokens = chance.choice(PROMPT_LENGTHS)
    if "tools" not in names and "reasoning" not in names:
        body["prompt"] = chance.choices(VOCABULARY, k=num_prompt_tokens)
        return StormCase(f"storm-{number}", "/v1/completions", body, names)
    body["messages"] = [
        {"role": "user", "content": " ".join(chance.choices(WORDS, k=min(num_prompt_tokens, MAX_CHAT_WORDS)))}
    ]
    _finish_chat(body, end_of_reasoning)
    return StormCase(f"storm-{number}", "/v1/chat/completions", body, names)


def _finish_chat(body: dict[str, Any], end_of_reasoning: int) -> None:
    """Write parameters as chats have them. A constraint leaves no room for a forced call."""
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if "tool_choice" in body and ("response_format" in body or "structured_outputs" in body):
        body["tool_choice"] = "auto"
    if body.get("enable_thinking"):
        body["logit_bias"] = {**body.get("logit_bias", {}), str(end_of_reasoning): END_OF_REASONING_BIAS}
