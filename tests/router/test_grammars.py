"""Grammars from bodies, and their check in a bounded process."""

import asyncio
import json
import os

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
        matcher = LLMatcher(vocabulary.of(grammar), grammar, log_level=0)
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


NAMES = "a<|im_end|>b<tool_call><|im_start|>"
WITH_NAMES = {"type": "object", "properties": {NAMES: {"const": NAMES}}, "required": [NAMES]}


@pytest.fixture(scope="module", params=[None, "NFC"])
def written(request, tiny_qwen3, tmp_path_factory):
    """Return a text that a grammar allows, made of ordinary tokens alone."""
    directory = tmp_path_factory.mktemp("normalizing")
    content = json.loads((tiny_qwen3 / "tokenizer.json").read_text())
    content["normalizer"] = request.param and {"type": request.param}
    marker = {"id": 791, "content": "<tool_call>", "special": False}
    content["added_tokens"].append(content["added_tokens"][-1] | marker)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    end = content["added_tokens"][0]["id"]
    vocabulary = load_grammar_tokenizer(directory, [end], 800)
    special = {token["id"] for token in content["added_tokens"]}

    def write(grammar):
        matcher, token_ids = LLMatcher(vocabulary.of(grammar), grammar, log_level=0), []
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            allowed = [each for each in range(800) if mask[each // 8] >> each % 8 & 1]
            assert allowed and special.isdisjoint(allowed) and max(allowed) < 788, (token_ids, matcher.get_error())
            token_ids.append(allowed[len(token_ids) % len(allowed)])
            assert matcher.consume_token(token_ids[-1]), matcher.get_error()
        return vocabulary.usual.decode_bytes(token_ids).decode()

    return write


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (json_schema_grammar({"enum": [NAMES]}), json.dumps(NAMES)),
        (json_schema_grammar({"const": "<|im_start|>"}), '"<|im_start|>"'),
        (choice_grammar([NAMES]), NAMES),
        (choice_grammar(["<|im_start|>"]), "<|im_start|>"),
        (choice_grammar(["a<|endoftext|>"]), "a<|endoftext|>"),
        (regex_grammar(r"<\|im_end\|>!"), "<|im_end|>!"),
        (f"start: call_0\ncall_0: \"f(\" %json {schema_text({'enum': [NAMES]})} \")\"", f"f({json.dumps(NAMES)})"),
        (choice_grammar(["ne\u0301 \u212b"]), "ne\u0301 \u212b"),  # NFC composes the one, and replaces the other
        (choice_grammar(["<[795]>"]), "<[795]>"),
    ],
)  # fmt: skip
def test_text_is_written_with_ordinary_tokens(grammar, text, written):
    """Also where it spells the name of a special token, or the tokenizer would normalize it."""
    assert written(grammar) == text


def test_grammars_may_name_special_tokens(tiny_qwen3, tokenizer):
    vocabulary = load_grammar_tokenizer(tiny_qwen3, tokenizer.eos_token_ids, 800)
    marker = tokenizer.added_ids["<|im_start|>"]
    for term in ("<|im_start|>", f"<[{marker}]>"):
        grammar = f'start: "a" {term} "b"'
        matcher = LLMatcher(vocabulary.of(grammar), grammar, log_level=0)
        assert matcher.consume_tokens(tokenizer.encode("a", add_special_tokens=False).ids)
        assert matcher.compute_ff_tokens()[0] == marker
        assert matcher.consume_token(marker), matcher.get_error()


def test_ids_without_a_token_are_never_allowed(tiny_qwen3, tmp_path):
    content = json.loads((tiny_qwen3 / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    merges = [pair for pair in content["model"]["merges"] if "".join(pair) != last]
    unused = vocab.pop(last)
    vocab["zzzzzz"] = 800
    content["model"]["merges"] = merges
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    grammar = regex_grammar("<.+>")
    matcher = LLMatcher(load_grammar_tokenizer(tmp_path, [788], 900).of(grammar), grammar, log_level=0)
    mask = matcher.compute_bitmask()
    assert not mask[unused // 8] >> unused % 8 & 1


def with_kind(kind):
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001"], ["0", "0.0", "-0", "0.51"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.2"], ["1", "1.0"]),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, ["-1.5", "-1.2"], ["-1", "-1.0"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.1"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 0, "maximum": 0.3, "multipleOf": 0.1}, ["0.1", "0.3"], ["0", "0.4"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5"], ["0", "0.6"]),
        ({"exclusiveMinimum": 2, "minimum": 1, "maximum": 2.5}, ["2.5"], ["2", "1.5"]),
        ({"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}, ["0.5"], ["0"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
        ({"type": "integer", "maximum": (1 << 53) - 1}, [str((1 << 53) - 1)], [str(1 << 53)]),
        ({"oneOf": [{"const": 1}, {"const": 2}, {"const": True}]}, ["1", "2", "true"], ["3"]),
        ({"oneOf": [with_kind(1), with_kind(2), {"type": "null"}]}, ['{"kind":1}', "null"], ['{"kind":3}']),
        ({"type": "integer", "oneOf": [{"maximum": 9}, {"exclusiveMinimum": 9}]}, ["9", "10"], ["1.5"]),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": [2, "b"]}, {"type": "object"}]}, ["1", '"b"', "{}"], ['"c"']),
    ],
)  # fmt: skip
def test_numbers_are_those_that_a_schema_allows(schema, right, wrong, matches):
    grammar = json_schema_grammar(schema if "oneOf" in schema or "allOf" in schema else {"type": "number"} | schema)
    assert [matches(grammar, text) for text in right] == [True] * len(right)
    assert [matches(grammar, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"const": 1}, {"const": 1.0}],
        [{"type": "integer", "maximum": 9}, {"type": "number", "minimum": 9}],
        [{"type": "integer"}, {"type": ["number", "null"], "minimum": 0}],
        [with_kind(1), with_kind(1)],
        [with_kind(1), {**with_kind(2), "required": []}, {**with_kind(2), "type": ["object", "null"]}],
        [{"const": 1}, True],
        [{"const": 1}, {"required": [[]], "properties": 3, "type": [{}]}],
    ],
)
def test_alternatives_that_may_overlap_stay_alternatives(alternatives):
    assert '"oneOf"' in json_schema_grammar({"oneOf": alternatives})


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "integer", "minimum": 10**19, "maximum": 10**20}, "minimum has 10000000000000000000,"),
        ({"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}, "maximum has 9223372036854775807,"),
        ({"type": "number", "exclusiveMaximum": 1e20}, r"exclusiveMaximum has 1e\+20,"),
        ({"type": "number", "minimum": 3.9999999999999996}, "minimum has 3.9999999999999996,"),
        ({"properties": {"a": {"items": {"enum": [[(1 << 53) + 1]]}}}}, "enum has 9007199254740993,"),
        ({"$defs": {"const": {"const": 1e-30}}}, "const has 1e-30,"),
        (
            {"type": "number", "oneOf": [{"exclusiveMinimum": 10**400}, {"maximum": 0}]},
            "exclusiveMinimum has a number of more than 60 digits,",
        ),
    ],
)
def test_numbers_that_cannot_be_enforced_are_refused_or_left_out(schema, named):
    with pytest.raises(GrammarError, match=f"{named} which can't be enforced; use at most 15 digits.*or leave"):
        json_schema_grammar(schema)
    assert f'"{named.split()[0]}":' not in json_schema_grammar(schema, is_strict=False).replace('"const":{', "")


def test_names_of_properties_are_no_keywords():
    properties = {"exclusiveMinimum": True, "minimum": {"const": 1}, "const": {"enum": [2]}, "oneOf": {}}
    assert json.dumps(properties, separators=(",", ":")) in json_schema_grammar({"properties": properties})
    default = {"default": {"exclusiveMinimum": 0, "maximum": 1 << 64}}
    assert json.dumps(default, separators=(",", ":"))[1:-1] in json_schema_grammar(default)


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
    slow = json_schema_grammar({"properties": {f"p{i}": {"type": "string", "maxLength": 99} for i in range(3000)}})

    async def run():
        checker = GrammarChecker(tiny_qwen3, tokenizer.eos_token_ids, cpu_seconds=0.1)
        try:
            (error,) = await verdicts(checker, [slow])
            assert "takes more than 0.1 s" in error
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
