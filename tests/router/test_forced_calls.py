"""Grammars of forced calls: what the model must write is what the response template reads, and nothing else passes."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model_outputs import OUTPUTS, TIME, TOOLS, WEATHER
from splitserve.router.output.catalog import NAMES, bundled, choose_format
from splitserve.router.output.forced import ForcedCalls, Reasoning
from splitserve.router.output.parts import assembled
from splitserve.router.output.splitter import Splitter
from splitserve.router.text.grammars import GrammarError, json_schema_grammar, regex_grammar, schema_text

FORCED = [name for name in NAMES if bundled(name).forced_call is not None]
PROMPTS = {output.template: output.prompt for output in OUTPUTS if output.calls}
SPECIAL = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),  # noqa: RUF001
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
]


@pytest.fixture(scope="module", params=["special", "added", "plain"])
def vocabulary(request):
    """A vocabulary of bytes, in which the borders are special tokens, added tokens, or plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    if request.param == "special":
        tokenizer.add_special_tokens(SPECIAL)
    elif request.param == "added":
        tokenizer.add_tokens(SPECIAL)
    ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return tokenizer, ids, LLTokenizer(tokenizer.to_str(), eos_token=ids["<eos>"])


def forced(name, vocabulary, reasoning=Reasoning.OPTIONAL, tools=TOOLS, *, is_parallel=True):
    calls = ForcedCalls(bundled(name).forced_call, vocabulary[1], schema_text)
    grammar = calls.grammar([tool["function"] for tool in tools], reasoning, is_parallel=is_parallel)
    matcher = LLMatcher(vocabulary[2], grammar)
    assert not matcher.get_error(), f"{matcher.get_error()}\n{grammar}"
    return matcher


def passes(matcher, vocabulary, text):
    """Return whether the grammar allows the whole text."""
    ids = vocabulary[0].encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(name, *calls):
    """Calls as the form has them."""
    form = bundled(name).forced_call
    texts = []
    for number, (function, arguments) in enumerate(calls):
        inside = json.dumps(arguments)
        if form.tag:
            values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            before, _, after = form.tag.partition("{value}")
            inside = "".join(before.replace("{key}", key) + value + after for key, value in values.items())
        text = form.call.replace("{name}", function).replace("{number}", str(number))
        texts.append(text.replace("{arguments}", inside))
    return form.begin + (form.separator or "").join(texts) + form.end


ANSWERS = [json_schema_grammar({"type": "integer"}), regex_grammar("[0-9]{2}"), 'start: "12"']
PARIS = {"city": "Paris <b> x", "days": 3}


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_is_one_that_the_template_reads(name, vocabulary):
    form = bundled(name).forced_call
    calls = [("get_weather", PARIS), ("get-time", {})]
    if form.separator is None:
        calls = calls[:1]
    for thought in ("", form.reasoning_open and f"{form.reasoning_open}\nHm < 3.\n{form.reasoning_close}"):
        text = thought + written(name, *calls)
        assert passes(forced(name, vocabulary), vocabulary, text), text
        splitter = Splitter(choose_format(name, "t", None, "m").with_tools, PROMPTS[name], TOOLS)
        message = assembled(splitter.push(text) + splitter.finish())
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
        assert message.reasoning == ("Hm < 3." if thought else "") and message.content == ""


@pytest.mark.parametrize("name", FORCED)
def test_nothing_else_passes(name, vocabulary):
    good = written(name, ("get_weather", PARIS))
    for text in ("Hello.", "", written(name, ("other", {})), written(name, ("get_weather", {"days": 3})), good[:-1]):
        assert not passes(forced(name, vocabulary), vocabulary, text), text
    assert not passes(forced(name, vocabulary, tools=[TIME]), vocabulary, good), "another tool than the named one"
    two = written(name, ("get_weather", PARIS), ("get-time", {}))
    assert not passes(forced(name, vocabulary, is_parallel=False), vocabulary, two)
    assert passes(forced(name, vocabulary, tools=[WEATHER], is_parallel=False), vocabulary, good)


@pytest.mark.parametrize("name", [name for name in FORCED if bundled(name).forced_call.reasoning_close])
def test_reasoning_that_the_prompt_opened_must_end_before_the_call(name, vocabulary):
    call = written(name, ("get_weather", PARIS))
    close = bundled(name).forced_call.reasoning_close
    assert passes(forced(name, vocabulary, Reasoning.OPEN), vocabulary, f"Hm.\n{close}{call}")
    assert not passes(forced(name, vocabulary, Reasoning.OPEN), vocabulary, "Hm, no end. " + call[:8])
    assert not passes(forced(name, vocabulary, Reasoning.NONE), vocabulary, f"Hm.\n{close}{call}")


@pytest.mark.parametrize("name", [name for name in FORCED if bundled(name).forced_call.reasoning_close])
@pytest.mark.parametrize("grammar", ANSWERS)
def test_a_grammar_of_the_answer_leaves_the_reasoning_free(name, grammar, vocabulary):
    form = bundled(name).forced_call
    calls = ForcedCalls(form, vocabulary[1], schema_text)
    for reasoning in Reasoning:
        matcher = LLMatcher(vocabulary[2], calls.after_reasoning(grammar, reasoning))
        assert not matcher.get_error(), matcher.get_error()
        thought = f"Hm < 3.\n{form.reasoning_close}"
        texts = {Reasoning.NONE: "", Reasoning.OPEN: thought, Reasoning.OPTIONAL: form.reasoning_open + thought}
        assert passes(matcher.deep_copy(), vocabulary, texts[reasoning] + form.answer_begin + "12")
        assert not passes(matcher.deep_copy(), vocabulary, texts[reasoning] + form.answer_begin + "x")


# ---- properties of all kinds, as tags ----

TAGGED = [name for name in FORCED if bundled(name).forced_call.tag]


def tool_of(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        (True, ["some <b>text"], []),
        ({"enum": ["celsius", "", "x\ny"]}, ["celsius", "", "x\ny"], ["kelvin", '"celsius"']),
        ({"type": ["string", "null", "integer"], "enum": ["one", 2, None]}, ["one", 2, None], ["two", 3]),
        ({"type": "string", "const": "one"}, ["one"], ["two"]),
        ({"type": "integer", "enum": [1, 2]}, [1, 2], [3, "one"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["some text", None], []),
    ],
)
def test_values_of_properties_are_written_as_the_template_reads_them(name, schema, values, others, vocabulary):
    tool = tool_of({"properties": {"a": schema, "{value}": {"type": "string"}}, "required": ["a"]})
    for value in values:
        arguments = {"a": value, "{value}": "x"}
        text = written(name, ("f", arguments))
        assert passes(forced(name, vocabulary, tools=[tool]), vocabulary, text), text
        splitter = Splitter(choose_format(name, "t", None, "m").with_tools, PROMPTS[name], [tool])
        (call,) = assembled(splitter.push(text) + splitter.finish()).calls
        assert json.loads(call.arguments) == arguments
    for value in others:
        assert not passes(forced(name, vocabulary, tools=[tool]), vocabulary, written(name, ("f", {"a": value})))


NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": ["a"]}, r'properties must be an object of JSON schemas, got \["a"\]'),
        ({"properties": {"a": 5}}, 'the schema of property "a" must be an object, true or false, got 5'),
        ({"properties": {"a": {}}, "required": True}, "required must be a list of names of properties, got true"),
        ({"properties": {"a": {}}, "required": [1]}, r"required must be a list of names of properties, got \[1\]"),
        ({"properties": {}, "required": NESTED}, "got a deeply nested value"),
        ({"properties": {"a": {"enum": [NESTED]}}}, "the JSON schema isn't JSON"),
        ({"properties": {"a": {"enum": ["x" * 200_000]}}}, "1 functions has 200[0-9]{3} characters; at most 131072"),
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_a_schema_that_no_tags_can_follow_is_refused(name, parameters, message):
    calls = ForcedCalls(bundled(name).forced_call, {}, schema_text)
    with pytest.raises(GrammarError, match=message):
        calls.grammar([tool_of(parameters)["function"]], Reasoning.NONE, is_parallel=True)


@pytest.mark.parametrize("kind", [None, 5, {}, [["string"]]])
@pytest.mark.parametrize("name", FORCED)
def test_an_unknown_type_is_left_to_the_compiler_of_grammars(name, kind):
    calls = ForcedCalls(bundled(name).forced_call, {}, schema_text)
    function = tool_of({"properties": {"a": {"type": kind}}})["function"]
    grammar = calls.grammar([function], Reasoning.NONE, is_parallel=True)
    assert "type must be a string" in str(LLMatcher.validate_grammar(grammar))
