"""Grammars from bodies, and their check in a bounded process."""

import asyncio
import json
import os
import time

import pytest
from llguidance import LLMatcher

from splitserve.common.grammars import load_grammar_tokenizer
from splitserve.router.http.api_error import ApiError
from splitserve.router.text.grammars import (
    GrammarError,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    schema_text,
)
from splitserve.router.text.processes.grammar_checker import GrammarChecker
from splitserve.router.text.structured_output import ResponseFormat, StructuredOutputs, refused, requested_grammar
from splitserve.router.text.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen3):
    return ModelTokenizer(tiny_qwen3)


@pytest.fixture(scope="module")
def matches(tiny_qwen3, tokenizer):
    """Return whether a text is one of a grammar's."""
    vocabulary = load_grammar_tokenizer(tiny_qwen3, tokenizer.eos_token_ids)

    def accepts(grammar, text):
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (json_schema_grammar(SCHEMA), ['{"a":1}', '{ "a" : 1 }', '{\n  "a": -7\n}'], ["{}", '{"a":1.5}', '{"b":2}']),
        (json_schema_grammar(SCHEMA), [], ['{"a":' + 40 * " " + "1}", ' {"a":1}']),
        (json_schema_grammar(True), ["1", '"é"', "[null]"], ["nul", ""]),
        (json_schema_grammar({"uniqueItems": True, "type": "array"}, is_strict=False), ["[1, 1]"], ["1"]),
        (regex_grammar(r"\d{3}-[a-z]+/\x41"), ["123-abc/A"], ["12-abc/A", "123-abc/A "]),
        (choice_grammar(["yes", 'no "really"', "né\n"]), ["yes", 'no "really"', "né\n"], ["no", "yes "]),
        (lark_grammar('start: "a" b+\nb: "b" | "c"'), ["abcb"], ["a", "b"]),
        (lark_grammar('root ::= "a" [0-9]+'), ["a12"], ["a", "b"]),
        (
            lark_grammar(f'start: "f(" %json {schema_text(SCHEMA)} ")"'),
            ['f({"a":1})', 'f({ "a" : 2 })'],
            ["f()", 'f({"a":"x"})'],
        ),
    ],
)  # fmt: skip
def test_grammars_match_what_they_should(grammar, right, wrong, matches):
    for text in right:
        assert matches(grammar, text), text
    for text in wrong:
        assert not matches(grammar, text), text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: json_schema_grammar({"x-guidance": {"lenient": True}}), "x-guidance, which is reserved"),
        (lambda: json_schema_grammar(False), "no value satisfies"),
        (lambda: json_schema_grammar({"const": float("nan")}), "isn't JSON"),
        (lambda: json_schema_grammar({"enum": ["x" * (1 << 17)]}), "at most 131072"),
        (lambda: lark_grammar(' {"grammars": []}'), "Lark's syntax"),
        (lambda: lark_grammar("root ::= ((("), "isn't valid GBNF"),
    ],
)
def test_what_is_no_grammar_is_refused(make, message):
    with pytest.raises(GrammarError, match=message):
        make()


def requested(**fields):
    given = {"response_format": None, "structured_outputs": None}
    for name, value in fields.items():
        model = ResponseFormat if name == "response_format" else StructuredOutputs
        given[name] = model.model_validate_json(json.dumps(value))
    return requested_grammar(**given)


def test_bodies_ask_for_grammars():
    assert requested() is None
    assert requested(response_format={"type": "text"}) is None
    json_object = (json_schema_grammar({"type": "object"}), "response_format")
    assert requested(response_format={"type": "json_object"}) == json_object
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}}
    assert requested(response_format=given) == (json_schema_grammar(SCHEMA), "response_format.json_schema.schema")
    given["json_schema"]["strict"] = False
    assert requested(response_format=given)[0] == json_schema_grammar(SCHEMA, is_strict=False)
    field = "structured_outputs."
    assert requested(structured_outputs={"json": json.dumps(SCHEMA)}) == (json_schema_grammar(SCHEMA), field + "json")
    assert requested(structured_outputs={"json": SCHEMA}) == (json_schema_grammar(SCHEMA), field + "json")
    assert requested(structured_outputs={"regex": "a+"}) == (regex_grammar("a+"), field + "regex")
    assert requested(structured_outputs={"choice": ["a"]}) == (choice_grammar(["a"]), field + "choice")
    assert requested(structured_outputs={"grammar": 'start: "a"'}) == ('start: "a"', field + "grammar")
    assert requested(structured_outputs={"json_object": True})[1] == field + "json_object"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "it has regex and choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "isn't valid JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "it is a list"),
        ({"structured_outputs": {"json": "[" * 140 + "]" * 140}}, None, "more than 128 levels"),
        ({"structured_outputs": {"grammar": "{}"}}, "structured_outputs.grammar", "Lark's syntax"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
            "only allowed with type json_schema",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "give one of them",
        ),
    ],
)
def test_contradictory_constraints_are_refused(fields, param, message):
    with pytest.raises(ApiError, match=message) as refusal:
        requested(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_refusals_name_the_keywords():
    error = refused("response_format.json_schema.schema", GrammarError('Unimplemented keys: ["not", "if"]'))
    assert "can't be enforced: not, if;" in error.message and "strict: false" in error.message
    assert error.param == "response_format.json_schema.schema" and error.status == 400


async def verdicts(checker, grammars):
    found = []
    for grammar in grammars:
        try:
            await checker.check(grammar)
            found.append("")
        except GrammarError as error:
            found.append(str(error))
    return found


def test_grammars_are_compiled_in_a_process(tiny_qwen3, tokenizer):
    """A grammar that ends the process costs only itself."""
    deep = {"type": "array"}
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    grammars = {
        json_schema_grammar(SCHEMA): "",
        json_schema_grammar(deep): "",
        json_schema_grammar({"not": {}}): 'Unimplemented keys: ["not"]',
        json_schema_grammar({"type": "string", "format": "iban"}): "Unknown format: iban",
        json_schema_grammar({"$ref": "#"}): "no text satisfies it",
        json_schema_grammar({"$ref": "https://example.com/x"}): "example.com",
        regex_grammar("(?=a)b"): "look-around",
        "start: x": 'unknown name: "x"',
        "start: " + "(" * 50_000 + '"a"' + ")" * 50_000: "nested",
        regex_grammar("(((a{1,300}b){1,300}c){1,300}d){1,300}"): "",
    }

    async def run():
        checker = GrammarChecker(tiny_qwen3, tokenizer.eos_token_ids)
        try:
            first = await verdicts(checker, grammars)
            process = checker._child.process
            process.kill()
            process.wait()
            again = await verdicts(checker, grammars)
            assert checker._child.process is process, "a known grammar was compiled again"
            assert await verdicts(checker, ['start: "new"']) == [""]
            assert checker._child.process is not process
            return first, again
        finally:
            checker.close()

    first, again = asyncio.run(run())
    assert first == again
    for (grammar, expected), found in zip(grammars.items(), first, strict=True):
        assert (expected in found) if expected else not found, (grammar[:100], found)


def test_a_grammar_that_takes_too_long_is_given_up(tiny_qwen3, tokenizer):
    slow = json_schema_grammar({"properties": {f"p{i}": {"type": "string", "maxLength": 99} for i in range(1500)}})

    async def run():
        checker = GrammarChecker(tiny_qwen3, tokenizer.eos_token_ids, cpu_seconds=0.01)
        try:
            began = time.monotonic()
            (error,) = await verdicts(checker, [slow])
            assert "takes more than 0.01 s" in error
            assert time.monotonic() - began < 60
            assert await verdicts(checker, ['start: "a"']) == [""]
        finally:
            checker.close()

    asyncio.run(run())


def test_a_directory_without_tokenizer_is_named(tmp_path):
    async def run():
        checker = GrammarChecker(tmp_path, [1])
        try:
            with pytest.raises(GrammarError, match=r"tokenizer\.json"):
                await checker.check('start: "a"')
        finally:
            checker.close()

    asyncio.run(run())


def test_the_process_ends_with_its_checker(tiny_qwen3, tokenizer):
    async def run():
        checker = GrammarChecker(tiny_qwen3, tokenizer.eos_token_ids)
        await checker.check('start: "a"')
        process = checker._child.process
        checker.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)

    asyncio.run(run())
