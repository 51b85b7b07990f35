"""Response templates: realistic outputs of each family, in any pieces; the choice of a template; damaged outputs."""

import json
import random

import pytest

from model_outputs import DS_CALL, DS_SEP, OUTPUTS, QWEN, TOOLS, Output, qwen_call
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.router.output.catalog import AUTO, NAMES, NONE, bundled, choose_format
from splitserve.router.output.parts import PartKind, assembled
from splitserve.router.output.splitter import Splitter


def opened(template, prompt="", *, tools=TOOLS, **options):
    found = choose_format(template, "a chat template", None, "model")
    segmentation = found.with_tools if tools else found.without_tools
    return Splitter(segmentation, prompt, tools, id_style=found.file.call_ids, **options)


def split(splitter, pieces):
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return parts + splitter.finish()


def summary(parts):
    message = assembled(parts)
    return message.content, message.reasoning, tuple((call.name, call.arguments) for call in message.calls)


def cut(text, draw):
    """Any pieces that make up the text."""
    marks = sorted(draw.sample(range(1, len(text)), draw.randint(0, min(40, len(text) - 1))))
    return [text[begin:end] for begin, end in zip([0, *marks], [*marks, len(text)], strict=True)]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda each: f"{each.template}: {each.text[:30]!r}")
def test_outputs_are_split_alike_in_any_pieces(output: Output):
    expected = (output.content, output.reasoning, output.calls)
    whole = split(opened(output.template, output.prompt), [output.text])
    assert summary(whole) == expected
    assert all(arguments and isinstance(json.loads(arguments), dict) for _, arguments in output.calls)
    draw = random.Random(output.text)
    for pieces in [list(output.text), *(cut(output.text, draw) for _ in range(12))]:
        parts = split(opened(output.template, output.prompt), pieces)
        assert summary(parts) == expected, pieces
        ids = tuple(part.call_id for part in parts if part.kind is PartKind.CALL)
        assert len(set(ids)) == len(output.calls) and ids[: len(output.ids)] == output.ids


def test_every_template_has_an_output_and_is_a_file_of_its_own_name():
    assert {output.template for output in OUTPUTS} == set(NAMES)
    assert all(bundled(name).name == name for name in NAMES)


@pytest.mark.parametrize("template", [name for name in NAMES if name not in ("gemma4", "functiongemma")])
def test_a_call_begins_with_its_name_and_its_arguments_come_as_they_are_written(template):
    output = next(each for each in OUTPUTS if each.template == template and each.calls)
    splitter = opened(template, output.prompt)
    parts = split(splitter, list(output.text))
    of_call = [part for part in parts if part.kind in (PartKind.CALL, PartKind.ARGUMENTS) and part.index == 0]
    assert of_call[0].kind is PartKind.CALL and of_call[0].name == output.calls[0][0]
    assert len(of_call) > 2, "the arguments came in one piece"


# ---- damaged outputs ----


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda each: f"{each.template}: {each.text[:30]!r}")
def test_an_output_cut_anywhere_loses_no_call_and_raises_nothing(output: Output):
    ends = range(len(output.text))
    for end in random.Random(output.text).sample(ends, min(len(ends), 25)):
        pieces = list(output.text[:end])
        content, reasoning, calls = summary(split(opened(output.template, output.prompt), pieces))
        whole = summary(split(opened(output.template, output.prompt), [output.text[:end]]))
        assert (content, reasoning, calls) == whole, end
        assert [name for name, _ in calls] == [name for name, _ in output.calls[: len(calls)]]
        for (_, arguments), (_, complete) in zip(calls[:-1], output.calls, strict=False):
            assert arguments == complete
        # The beginning of what would have closed the reasoning is text, at the end of a cut output.
        assert output.reasoning.startswith(reasoning) or reasoning.startswith(output.reasoning)


def test_arguments_that_are_no_json_come_out_as_they_are():
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": oops, "x": [}}\n</tool_call>'
    assert summary(split(opened("hermes", QWEN), [text]))[2][0][1] == '{"city": oops, "x": [}}'
    text = "[TOOL_CALLS]get_weather[ARGS]not json at all"
    assert summary(split(opened("mistral-args"), list(text)))[2] == (("get_weather", "not json at all"),)
    text = '<|tool_call>call:get_weather{city:"Paris, <oops>}<tool_call|>'
    assert summary(split(opened("gemma4"), list(text)))[2] == (("get_weather", '{city:"Paris, <oops>}'),)


def test_a_call_that_is_none_comes_out_as_content():
    text = "See:\n<tool_call>\nnothing of that kind\n</tool_call>"
    content, _, calls = summary(split(opened("hermes", QWEN), list(text)))
    assert not calls and content.startswith("See:\n<tool_call>") and "nothing of that kind" in content
    assert summary(split(opened("hermes", QWEN), list('\n\n<tool_call>\n{"nam\n')))[0] == '<tool_call>\n{"nam'
    text = "<tool_call>\nno tags here\n</tool_call> Bye"
    content, _, calls = summary(split(opened("qwen3.5", QWEN), list(text)))
    assert not calls and "no tags here" in content and content.endswith("Bye")


def test_text_outside_all_channels_is_the_answer_if_there_is_no_other():
    splitter = opened("gpt-oss", "<|start|>assistant")
    assert summary(split(splitter, ["Just ", "text."])) == ("Just text.", "", ())


def test_special_tokens_are_hidden_unless_they_open_or_close_a_region():
    splitter = opened("qwen3", QWEN)
    splitter.hide("<|im_start|>")
    splitter.hide("</think>")
    text = "<think>One.</think>Two.<|im_start|>Three.<|box|>"
    assert summary(split(splitter, [text])) == ("Two.Three.<|box|>", "One.", ())


def test_without_tools_a_call_is_text():
    text = qwen_call("get_weather", "{}")
    content, _, calls = summary(split(opened("qwen3", QWEN, tools=[]), list(text)))
    assert (content, calls) == (text, ())


def test_one_call_only_where_calls_are_not_parallel():
    text = qwen_call("get_weather", "{}") + "\n" + qwen_call("get-time", "{}")
    for pieces in ([text], list(text)):
        assert summary(split(opened("hermes", QWEN, max_calls=1), pieces))[2] == (("get_weather", "{}"),)


def test_the_forms_of_a_call_in_json():
    for text, expected in [
        ('{"arguments": {"a": "}\\""}, "name": "f"}', ("f", '{"a": "}\\""}')),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"type": "function", "function": {"name": "f", "arguments": {"name": "g"}}}', ("f", '{"name": "g"}')),
        ('{"id": [1, {"name": "x"}], "name": "f", "arguments": {}, "parameters": {"b": 1}}', ("f", "{}")),
    ]:
        for pieces in ([text], list(text)):
            calls = summary(split(opened("hermes", QWEN), ["<tool_call>", *pieces, "</tool_call>"]))[2]
            assert calls == (expected,), text


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (
            "hermes",
            r'{"name": "f\ud83d\ude00\ud83d", "arguments": "{\"a\": \"\ude00\"}"}',
            ("f\U0001f600\ufffd", '{"a": "\ufffd"}'),
        ),
        ("hermes", r'{"name": "f", "arguments": {"a": "\ud83d"}}', ("f", r'{"a": "\ud83d"}')),
        (
            "qwen3.5",
            '<function=get_weather>\n<parameter=where>\n["\\ud83d", "\\ud83d\\ude00"]\n</parameter>\n</function>',
            ("get_weather", '{"where": ["\ufffd", "\U0001f600"]}'),
        ),
        ("gemma4", 'call:f{a:"\\ud83d"}', ("f", '{"a": "\ufffd"}')),
    ],
)
def test_half_a_character_is_replaced(template, text, expected):
    begin, end = ("<|tool_call>", "<tool_call|>") if template == "gemma4" else ("<tool_call>\n", "\n</tool_call>")
    for pieces in ([text], list(text)):
        calls = summary(split(opened(template, QWEN), [begin, *pieces, end]))[2]
        assert calls == (expected,)
        assert "".join(calls[0]).encode() and json.loads(calls[0][1])


def test_a_pattern_that_takes_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr("splitserve.router.output.search_budget.SEARCH_SECONDS", 0.01)
    evil = {
        "start_anchor": "A",
        "fields": {"content": {}, "reasoning_content": {"open_pattern": "(x+x+)+y", "close": "z"}},
    }
    splitter = Splitter(choose_format(AUTO, "t", evil, "m").with_tools, "", [])
    text = "Hello " + "x" * 4000
    assert summary(split(splitter, [text, " and more"])) == (text + " and more", "", ())


def test_the_parser_forgets_text_that_it_has_read():
    splitter = opened("qwen3", QWEN)
    pieces = ["<think>", *["some words "] * 4000, "</think>", *["more words "] * 4000]
    content, reasoning, _ = summary(split(splitter, pieces))
    assert (len(content), len(reasoning)) == (4000 * 11 - 1, 4000 * 11 - 1)
    assert len(splitter._parser._buffer) < 20_000


# ---- the choice ----

CHAT_TEMPLATES = {
    "qwen3": "<|im_start|>{{ '<tool_call>' }}{{ '<think>' }}",
    "hermes": "<|im_start|>{{ '<tool_call>' }}",
    "qwen3.5": "<|im_start|><tool_call>\n<function=x>\n<parameter=y> <think>",
    "llama3": "<|start_header_id|>ipython {{ 'parameters' }}",
    "mistral": "[INST] [TOOL_CALLS] [",
    "mistral-args": "[INST] [TOOL_CALLS]name[ARGS]",
    "deepseek-v3": f"<think> {DS_CALL}function{DS_SEP}name```json",
    "deepseek-v3.1": f"<think> {DS_CALL}name{DS_SEP}",
    "glm-4.5": "<|assistant|><think></think><tool_call><arg_key><arg_value>",
    "kimi-k2": "<|im_assistant|><|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>",
    "gpt-oss": "<|start|>assistant<|channel|>analysis<|message|>",
    "gemma4": "<|turn>model <|tool_call>call:",
    "functiongemma": "<start_of_turn>model <start_function_call>call:",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_chosen_by_the_chat_template(name):
    found = choose_format(AUTO, CHAT_TEMPLATES[name], None, "model")
    assert found is not None and found.file.name == name == found.where


def test_no_template_for_other_chat_templates():
    assert choose_format(AUTO, "{{ messages }}", None, "model") is None
    assert choose_format(AUTO, None, None, "model") is None
    assert choose_format(NONE, CHAT_TEMPLATES["qwen3"], None, "model") is None


def test_the_checkpoints_own_template_comes_first():
    own = {"start_anchor": "A:", "fields": {"thinking": {"open": "[[", "close": "]]"}, "content": {}}}
    found = choose_format(AUTO, CHAT_TEMPLATES["mistral"], own, "/models/m")
    assert "/models/m" in found.where and found.has_reasoning and not found.has_tools
    assert found.file.call_ids == "short", "what transformers' format has no place for comes from the one that fits"
    assert summary(split(Splitter(found.with_tools, "A:[[", []), ["a]]b"])) == ("b", "a", ())
    with pytest.raises(CheckpointError, match="/models/m"):
        choose_format(AUTO, "t", {"fields": {"content": {"open_pattern": "("}}, "start_anchor": "A"}, "/models/m")


def test_a_template_by_option(tmp_path):
    assert choose_format("glm-4.5", CHAT_TEMPLATES["qwen3"], {}, "model").file.name == "glm-4.5"
    bare = tmp_path / "mine.json"
    bare.write_text(json.dumps({"start_anchor": "A:", "fields": {"content": {}}}))
    assert choose_format(str(bare), "t", None, "model").file.name == "mine"
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps({"name": "x", "call_ids": "short", "response_template": json.loads(bare.read_text())}))
    assert choose_format(str(ours), "t", None, "model").file.call_ids == "short"
    for option, text in [
        ("nonsense", "glm-4.5"),
        (str(tmp_path), "nor one of"),
        (str(tmp_path / "none"), "nor one of"),
    ]:
        with pytest.raises(ConfigError, match=text):
            choose_format(option, "t", None, "model")
    bare.write_text('{"name": 3}')
    with pytest.raises(ConfigError, match=r"mine\.json"):
        choose_format(str(bare), "t", None, "model")
    bare.write_text('{"fields": {"content": {"open_pattern": "("}}, "start_anchor": "A"}')
    with pytest.raises(ConfigError, match=r"mine\.json"):
        choose_format(str(bare), "t", None, "model")
