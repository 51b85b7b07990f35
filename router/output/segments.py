"""Regions of an output, found by transformers' parser. The one module of the router that imports transformers, and
only its parser, which loads no torch.

The parser is used for the regions' borders alone: all fields are read as plain text, so that it fails at no content.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from splitserve.router.output.search_budget import BoundedPattern, SearchBudget

Event: TypeAlias = dict[str, Any]

OUTSIDE = "(outside)"
"""Field of the text outside all regions, for templates that give it none."""

TAIL_CHARS = 1 << 13  # of a prompt, in which the assistant's turn begins
_KEPT_CHARS = 256  # before the parser's position, for patterns that look behind or are anchored at the beginning
_TRIM_CHARS = 1 << 14
_MAX_HELD_CHARS = 1 << 9  # that may be the beginning of a delimiter, and are searched again with each new text


class Segmentation:
    """The regions of a response template (transformers' format). Raises ValueError for a template that is none."""

    def __init__(self, spec: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
        """``without``: fields to leave out; their text belongs to the field around them."""
        fields = {name: value for name, value in spec.get("fields", {}).items() if name not in without}
        self.spec = {**spec, "fields": fields}
        loaded: ResponseTemplate = load_response_template(self.spec)
        self.fields: dict[str, ResponseTemplateField] = dict(loaded.fields)
        self._readers = {name: _reader(loaded, each) for name, each in loaded.fields.items()}
        plain = {name: _as_text(each) for name, each in loaded.fields.items()}
        if loaded.implicit is None:
            plain[OUTSIDE] = _outside_field()
            loaded.implicit = OUTSIDE
        loaded.fields = plain
        loaded.start_anchor_re = BoundedPattern(loaded.start_anchor_re)
        self._template = loaded

    def parser(self, prompt: str, budget: SearchBudget) -> "SegmentParser":
        return SegmentParser(self._template, self._begun(prompt), budget)

    def _begun(self, prompt: str) -> str:
        """Return the part of the prompt that belongs to the message already."""
        tail = prompt[-TAIL_CHARS:]
        try:
            ends = [match.end() for match in self._template.start_anchor_re.finditer(tail)]
        except TimeoutError:
            ends = []
        return tail[ends[-1] :] if ends else ""

    def value(self, text: str, field: str, tools: list[dict[str, Any]]) -> Any:
        """Return what transformers makes of the text of one region, its opening included; None if it fails."""
        try:
            value = parse_response(text, self._readers[field], prefix="", tools=tools).get(field)
        except (ValueError, KeyError, TypeError, TimeoutError, RecursionError):
            return None
        return value[-1] if isinstance(value, list) and value else value


class SegmentParser(ResponseParser):  # type: ignore[misc]
    """transformers' parser, whose opening events carry the opening's text ("opening") and named groups ("captures").

    ``begun``: the part of the prompt that belongs to the message already.
    """

    _buffer: str
    _pos: int

    def __init__(self, template: ResponseTemplate, begun: str, budget: SearchBudget) -> None:
        super().__init__(template, prefix="")
        self._budget = budget
        self.is_given_up = False
        """Whether the searches took too long: :meth:`unread` returns the text from there on."""
        self.initial_events = self.feed(begun) if begun else []
        if self.is_given_up:
            self._pos = len(self._buffer)

    def feed(self, text: str) -> list[Event]:
        """Take in more text; return the events that it makes certain."""
        self._buffer += text
        events = self._events(eos=False)
        if (end := len(self._buffer) - _MAX_HELD_CHARS) > self._pos and not self.is_given_up:
            self._accumulate(events, self._buffer[self._pos : end])
            self._pos = end
        if self._pos > _TRIM_CHARS:  # else each feed copies all text so far
            self._buffer = self._buffer[self._pos - _KEPT_CHARS :]
            self._pos = _KEPT_CHARS
        return events

    def finish(self) -> list[Event]:
        """Return the last events, once no more text comes."""
        return self._events(eos=True)

    def _events(self, *, eos: bool) -> list[Event]:
        events: list[Event] = []
        try:
            with self._budget:
                self._process(events, eos=eos)
        except TimeoutError:
            self.is_given_up = True
        return events

    def unread(self) -> str:
        """Return the text that no event has shown."""
        rest: str = self._buffer[self._pos :]
        return rest

    def _open_explicit(self, events: list[Event], field: ResponseTemplateField, m: Any) -> None:
        super()._open_explicit(events, field, m)
        captures = {name: text for name, text in m.groupdict().items() if text is not None}
        events[-1] |= {"opening": m.group(), "captures": captures}

    def _accumulate(self, events: list[Event], text: str) -> None:
        super()._accumulate(events, text)
        self._body = ""  # the events have the text; else each feed copies all text of the region so far


def _reader(loaded: ResponseTemplate, field: ResponseTemplateField) -> ResponseTemplate:
    """Return a template that reads one region of ``field``, to the end of the text."""
    opening = None if field.open_re is None else BoundedPattern(field.open_re)
    return replace(
        loaded,
        defaults={},
        fields={field.name: replace(field, open_re=opening, close_re=None)},
        implicit=field.name if opening is None else None,
    )


def _as_text(field: ResponseTemplateField) -> ResponseTemplateField:
    return replace(
        field,
        open_re=None if field.open_re is None else BoundedPattern(field.open_re),
        close_re=None if field.close_re is None else BoundedPattern(field.close_re),
        content="text",
        content_args={"strip": False},
        repeats=False,
        join=None,
        optional=True,
        transform=None,
        transform_each=False,
    )


def _outside_field() -> ResponseTemplateField:
    spec = {"start_anchor": "-", "fields": {OUTSIDE: {"content": "text", "content_args": {"strip": False}}}}
    return load_response_template(spec).fields[OUTSIDE]
