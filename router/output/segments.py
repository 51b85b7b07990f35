"""Regions of an output, found by transformers' parser. The one module of the router that imports transformers, and
only its parser, which loads no torch.

The parser is used for the regions' borders alone: all fields are read as plain text, so that it fails at no content.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

Event: TypeAlias = dict[str, Any]

OUTSIDE = "(outside)"
"""Field of the text outside all regions, for templates that give it none."""

SEARCH_SECONDS = 0.1
"""Time limit of one search: patterns come with checkpoints, and some take for ever on some text."""

TAIL_CHARS = 1 << 13  # of a prompt, in which the assistant's turn begins
_KEPT_CHARS = 256  # before the parser's position, for patterns that look behind or are anchored at the beginning
_TRIM_CHARS = 1 << 14


class SegmentationError(Exception):
    """A pattern that took too long."""


class _BoundedPattern:
    """A compiled pattern whose searches have a time limit."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.groupindex = pattern.groupindex

    def search(self, text: str, pos: int = 0, partial: bool = False) -> Any:
        return self.pattern.search(text, pos, partial=partial, timeout=SEARCH_SECONDS)

    def match(self, text: str, pos: int = 0, partial: bool = False) -> Any:
        return self.pattern.match(text, pos, partial=partial, timeout=SEARCH_SECONDS)

    def finditer(self, text: str) -> Iterator[Any]:
        found: Iterator[Any] = self.pattern.finditer(text, timeout=SEARCH_SECONDS)
        return found


class Segmentation:
    """The regions of a response template (transformers' format). Raises ValueError for a template that is none."""

    def __init__(self, spec: Mapping[str, Any], without: tuple[str, ...] = ()) -> None:
        """``without``: fields to leave out; their text belongs to the field around them."""
        fields = {name: value for name, value in spec.get("fields", {}).items() if name not in without}
        self.spec = {**spec, "fields": fields}
        loaded: ResponseTemplate = load_response_template(self.spec)
        self.fields: dict[str, ResponseTemplateField] = dict(loaded.fields)
        plain = {name: _as_text(each) for name, each in loaded.fields.items()}
        if loaded.implicit is None:
            plain[OUTSIDE] = _outside_field()
            loaded.implicit = OUTSIDE
        loaded.fields = plain
        loaded.start_anchor_re = _BoundedPattern(loaded.start_anchor_re)
        self._template = loaded

    def parser(self, prompt: str) -> "SegmentParser":
        return SegmentParser(self._template, self._begun(prompt))

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
            value = parse_response(text, self.spec, prefix="", tools=tools).get(field)
        except (ValueError, KeyError, TypeError, TimeoutError):
            return None
        return value[-1] if isinstance(value, list) and value else value


class SegmentParser(ResponseParser):  # type: ignore[misc]
    """transformers' parser, whose opening events carry the opening's text ("opening") and named groups ("captures")."""

    _buffer: str
    _pos: int

    def feed(self, text: str) -> list[Event]:
        try:
            events: list[Event] = super().feed(text)
        except TimeoutError as error:
            raise SegmentationError("a pattern of the response template takes too long") from error
        if self._pos > _TRIM_CHARS:  # else each feed copies all text so far
            self._buffer = self._buffer[self._pos - _KEPT_CHARS :]
            self._pos = _KEPT_CHARS
        return events

    def finish(self) -> list[Event]:
        """Return the last events, once no more text comes."""
        try:
            events: list[Event] = self.finalize()[1]
        except TimeoutError as error:
            raise SegmentationError("a pattern of the response template takes too long") from error
        return events

    def unread(self) -> str:
        """Return the text that no event has shown."""
        rest: str = self._buffer[self._pos :]
        return rest

    def _open_explicit(self, events: list[Event], field: ResponseTemplateField, m: Any) -> None:
        super()._open_explicit(events, field, m)
        captures = {name: text for name, text in m.groupdict().items() if text is not None}
        events[-1] |= {"opening": m.group(), "captures": captures}


def _as_text(field: ResponseTemplateField) -> ResponseTemplateField:
    return replace(
        field,
        open_re=None if field.open_re is None else _BoundedPattern(field.open_re),
        close_re=None if field.close_re is None else _BoundedPattern(field.close_re),
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
