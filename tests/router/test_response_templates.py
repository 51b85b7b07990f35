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
    for pieces in [list(output.text), *(cut(output.text, draw) for _ in range(30))]:
        parts = split(opened(output.template, output.prompt), pieces)
        assert summary(parts) == expected, pieces
        ids = tuple(part.call_id for part in parts if part.kind is PartKind.CALL)
        assert len(set(ids)) == len(output.calls) and ids[: len(output.ids)] == output.ids


def test_every_template_has_an_output_and_is_a_file_of_its_own_name():
    assert {output.template for output in OUTPUTS} == set(NAMES)
    assert all(bundled(name).name == name for name in NAMES)


@pytest.mark.parametrize(
    "template", [name for name in NAMES if name not in ("gemma4", "functiongemma")]
)
def test_a_call_begins_with_its_name_and_its_arguments_come_as_they_are_written(template):
    output = next(each for each in OUTPUTS if each.template == template and each.calls)
    splitter = opened(template, output.prompt)
    parts = split(splitter, list(output.text))
    of_call = [part for part in parts if part.kind in (PartKind.CALL, PartKind.ARGUMENTS) and part.index == 0]
    assert of_call[0].kind is PartKind.CALL and of_call[0].name == output.calls[0][0]
    assert len(of_call) > 2, "the arguments came in one piece"
