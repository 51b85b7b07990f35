"""Searches by the patterns of response templates: their cost grows no faster than the output, and has a limit."""

import json

import pytest

from model_outputs import OUTPUTS, TOOLS
from splitserve.router.output import search_budget
from splitserve.router.output.catalog import AUTO, NAMES, choose_format
from splitserve.router.output.parts import assembled
from splitserve.router.output.search_budget import BoundedPattern
from splitserve.router.output.splitter import Splitter

QWEN_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
EVIL_TAGS = {
    "start_anchor": "A",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<c>(?P<name>\w+)\n",
            "close": "</c>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": "<(?P<key>(x+x+)+)y(?P<value>[^>]*)>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def opened(template, own=None, prompt=""):
    return Splitter(choose_format(template, "a chat template", own, "model").with_tools, prompt, TOOLS)


def message(splitter, pieces):
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return assembled(parts + splitter.finish())


def calls_of(found):
    return [(call.name, call.arguments) for call in found.calls]


@pytest.fixture
def searched(monkeypatch):
    """The lengths of the texts that patterns search."""
    lengths = []
    search = BoundedPattern.search

    def counted(pattern, text, pos=0, partial=False):
        lengths.append(len(text) - pos)
        return search(pattern, text, pos, partial)

    monkeypatch.setattr(BoundedPattern, "search", counted)
    return lengths


@pytest.mark.parametrize(("template", "call"), [("qwen3.5", QWEN_CALL), ("glm-4.5", GLM_CALL)])
def test_the_value_of_a_long_argument_is_searched_a_few_times(template, call, searched):
    value = "    value = compute(a < b, second)\n" * 100
    text = call.format(value)
    found = message(opened(template), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("get_weather", {"city": value})]
    assert sum(searched) < 40 * len(text), "each piece is searched by several patterns, but not all text with each"


@pytest.mark.parametrize("template", NAMES)
@pytest.mark.parametrize("space", ["\n", "    "])
def test_an_output_of_much_space_is_still_split(template, space, searched):
    output = next(each for each in OUTPUTS if each.template == template and each.calls)
    for begin in ("", "Hello."):
        splitter = opened(template, prompt=output.prompt)
        pieces = [begin, *[space] * (3000 // len(space)), *output.text]
        found = message(splitter, pieces)
        if template != "llama3":  # whose calls are at the beginning only
            assert [(call.name, call.arguments) for call in found.calls] == list(output.calls)
        assert not splitter._is_failed, "the patterns took too long"
    assert max(searched) < 2000


@pytest.mark.parametrize("template", NAMES)
def test_a_call_with_much_space_after_its_arguments_is_still_split(template, searched):
    output = next(each for each in OUTPUTS if each.template == template and each.calls)
    at = output.text.index(output.calls[0][0]) + len(output.calls[0][0])
    for end in (at, len(output.text)):
        splitter = opened(template, prompt=output.prompt)
        message(splitter, [*output.text[:end], *["  "] * 1500])
        assert not splitter._is_failed, "the patterns took too long"
    assert max(searched) < 6000


def test_tags_are_given_up_at_the_first_search_that_takes_too_long(monkeypatch, searched):
    monkeypatch.setattr(search_budget, "SEARCH_SECONDS", 0.01)
    splitter = opened(AUTO, EVIL_TAGS)
    evil = "<" + "x" * 4000
    parts = splitter.push("<c>f\n<xxy1>") + splitter.push(evil)
    count = len(searched)
    parts += [part for _ in range(5) for part in splitter.push(" more>")]
    assert len(searched) <= count + 5, "the text of the region is searched for its end only"
    found = assembled([*parts, *splitter.push("</c>Bye.<c>g\n<xxy2></c>"), *splitter.finish()])
    assert calls_of(found) == [("f", '{"xx": "1"' + evil + " more>" * 5), ("g", '{"xx": "2"}')]
    assert found.content == "Bye."


def test_an_output_whose_searches_took_too_long_loses_no_text(monkeypatch):
    monkeypatch.setattr(search_budget, "SEARCH_SECONDS", 0.01)
    monkeypatch.setattr(search_budget, "OUTPUT_SECONDS", 0.02)
    evil = {"start_anchor": "A", "fields": {"content": {}, "reasoning": {"open_pattern": "(x+x+)+y", "close": "z"}}}
    splitter = opened(AUTO, evil)
    pieces = ["Hello ", "x" * 4000, " more", "xxxyHmz"]
    assert message(splitter, pieces).content == "".join(pieces)


def test_the_searches_of_one_output_share_their_time(monkeypatch):
    monkeypatch.setattr(search_budget, "_ORDINARY_SECONDS", 0.0)
    monkeypatch.setattr(search_budget, "OUTPUT_SECONDS", 1e-9)
    pieces = ["Hello. ", "<tool_call>", '{"name": "f"}', "</tool_call>"]
    assert message(opened("qwen3"), pieces).content == "".join(pieces)


@pytest.mark.parametrize("template", NAMES)
def test_without_time_for_searches_all_text_is_content(template, monkeypatch):
    monkeypatch.setattr(search_budget, "OUTPUT_SECONDS", -1.0)
    for output in OUTPUTS:
        if output.template == template:
            for pieces in ([output.text], list(output.text)):
                assert message(opened(template, prompt=output.prompt), pieces).content == output.text


def test_a_call_beyond_the_allowed_number_stays_hidden_when_the_search_is_given_up(monkeypatch):
    splitter = Splitter(choose_format(AUTO, "t", EVIL_TAGS, "m").with_tools, "", TOOLS, max_calls=1)
    parts = splitter.push("<c>f\n<xxy1></c><c>g\n<xxy")
    monkeypatch.setattr(splitter._budget, "_left_seconds", -1.0)
    found = assembled([*parts, *splitter.push("2"), *splitter.finish()])
    assert calls_of(found) == [("f", '{"xx": "1"}')]


def test_a_value_that_is_too_deep_for_its_type_is_text():
    deep = "[" * 100_000
    text = QWEN_CALL.replace("city", "where").format(deep)
    (call,) = message(opened("qwen3.5"), [text]).calls
    assert json.loads(call.arguments) == {"where": deep}
