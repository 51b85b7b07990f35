"""Texts of the simulated storm: grammars of tool calls and JSON, and the check of what clients get. Not a test module.

The router's production code splits each output into parts of a message, update by update. The parts must add up to
those of the same tokens given at once: no byte of a call's arguments is lost or repeated. Documents must be valid.
"""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache

import jsonschema

from splitserve.protocol.request import FinishReason
from splitserve.protocol.sampling_features import Constraint
from splitserve.router.output.catalog import ResponseFormat, choose_format
from splitserve.router.output.forced import ForcedCalls, Reasoning
from splitserve.router.output.parts import Message, Part, assembled
from splitserve.router.output.splitter import Splitter
from splitserve.router.text.choice import Choice
from splitserve.router.text.detokenizer import WindowDetokenizer
from splitserve.router.text.grammars import json_schema_grammar, schema_text
from splitserve.simulation.router.client import SimClient
from storm_vocabulary import ADDED, ENDS, tokenizer

_PROMPT = "<|im_start|>assistant\n"
_STOPS = ("ba", "ed", "gg", '"}')
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-h]{1,4}$"}, "b": {"enum": [0, 1, 23]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXT_FEATURES = ("forced calls", "schema", "stop", "calls in the answer", "whole arguments", "reasoning in the answer")
_CALL, _SCHEMA = "call:", "json_schema"  # in grammars
TOOLS = {"ab": SCHEMA, "ce": {"type": "object", "properties": {}, "additionalProperties": False}}


@cache
def _format() -> ResponseFormat:
    found = choose_format("qwen3", None, None, "simulated")
    assert found is not None
    return found


def _forced_calls() -> ForcedCalls:
    form = _format().file.forced_call
    assert form is not None
    return ForcedCalls(form, {text: tokenizer().token_to_id(text) for text in ADDED}, schema_text)


def calls_constraint(chance: random.Random) -> Constraint:
    """Return the grammar of a forced tool call: of any of the tools or a certain one, perhaps after reasoning."""
    names = chance.choice([list(TOOLS), ["ab"], ["ce"]])
    functions = [{"name": name, "parameters": TOOLS[name], "strict": True} for name in names]
    reasoning = chance.choice([Reasoning.NONE, Reasoning.NONE, Reasoning.OPTIONAL])
    return Constraint(_forced_calls().grammar(functions, reasoning, is_parallel=chance.random() < 0.5), _end_ids())


def schema_constraint(chance: random.Random) -> Constraint:
    """Return the grammar of an answer by the schema, perhaps after reasoning."""
    reasoning = chance.choice([Reasoning.NONE, Reasoning.OPTIONAL])
    return Constraint(_forced_calls().after_reasoning(json_schema_grammar(SCHEMA), reasoning), _end_ids())


def _end_ids() -> tuple[int, ...]:
    return tuple(tokenizer().token_to_id(text) for text in ENDS)


def features_of_text(client: SimClient) -> Iterator[str]:
    """Yield which of the :data:`TEXT_FEATURES` a client has."""
    grammar = "" if client.sampling.constraint is None else client.sampling.constraint.grammar
    message = check_text(client)
    has = (
        _CALL in grammar,
        _SCHEMA in grammar,
        _stops_of(client) != [],
        bool(message.calls),
        any(call.arguments.endswith("}") for call in message.calls),
        bool(message.reasoning),
    )
    yield from (name for name, is_there in zip(TEXT_FEATURES, has, strict=True) if is_there)


def check_text(client: SimClient) -> Message:
    """Check what a client got against the same tokens given at once; returns its message."""
    updates = [(tokens, reason) for tokens, reason in client.updates if tokens or reason]
    reason = updates[-1][1] if updates else None
    streamed, piecewise = _parts(client, updates)
    whole, at_once = _parts(client, [(client.output, reason)])
    message, expected = assembled(streamed), assembled(whole)
    ours, theirs = ([(call.name, call.arguments) for call in each.calls] for each in (message, expected))
    assert ours == theirs, f"{client.request_id}: calls {ours} instead of {theirs}"
    texts = (message.content, message.reasoning), (expected.content, expected.reasoning)
    assert texts[0] == texts[1], f"{client.request_id}: content and reasoning {texts[0]} instead of {texts[1]}"
    assert piecewise.finish_reason == at_once.finish_reason, client.request_id
    ids = [call.call_id for call in message.calls]
    assert len(set(ids)) == len(ids), f"{client.request_id}: calls share ids {ids}"
    if reason is FinishReason.STOP and not piecewise.stop_string and client.output[-1] in _end_ids():
        _check_documents(client, message)
    return message


def _stops_of(client: SimClient) -> list[str]:
    seed = client.sampling.seed
    return [_STOPS[seed % len(_STOPS)]] if seed % 3 == 0 else []


def _parts(
    client: SimClient, updates: Sequence[tuple[Sequence[int], FinishReason | None]]
) -> tuple[list[Part], Choice]:
    """Return the parts of a client's message, and the choice that made them; its seed chooses stop strings."""
    seed = client.sampling.seed
    splitter = Splitter(_format().with_tools, _PROMPT, [], max_calls=1 if seed % 5 == 0 else None)
    special = {tokenizer().token_to_id(text): text for text in ENDS}
    choice = Choice(
        WindowDetokenizer(tokenizer(), skip_special_tokens=False),
        _stops_of(client),
        include_stop=seed % 2 == 0,
        min_tokens=client.sampling.min_tokens,
        splitter=splitter,
        special_texts=special,
    )
    parts: list[Part] = []
    for token_ids, reason in updates:
        if choice.finish_reason is None:
            parts += choice.push(token_ids, reason).parts or ()
    return parts, choice


def _check_documents(client: SimClient, message: Message) -> None:
    """Check an answer that its grammar let end against the schemas."""
    constraint = client.sampling.constraint
    if constraint is None:
        return
    if _CALL in constraint.grammar:
        assert message.calls, f"{client.request_id} ended without the call that it was forced to make"
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
    elif _SCHEMA in constraint.grammar:
        jsonschema.validate(json.loads(message.content), SCHEMA)
