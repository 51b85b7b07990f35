"""The split of one output into the parts of a message, as its text grows. No I/O.

The text is the model's, special tokens included: some open and close regions. Those that don't are hidden from clients.
Whatever the model writes, the split goes on: a call that is none comes out as content, arguments as they are.
"""

from typing import Any

from splitserve.router.output.calls import CallLog
from splitserve.router.output.parts import Part, PartKind
from splitserve.router.output.regions import (
    ArgumentsRegion,
    CallSource,
    JsonCallRegion,
    NoRegion,
    Region,
    TaggedArgumentsRegion,
    TextRegion,
    WholeCallRegion,
    kinds_of_text,
)
from splitserve.router.output.search_budget import BoundedPattern, SearchBudget
from splitserve.router.output.segments import OUTSIDE, Event, Segmentation

TOOL_CALLS = "tool_calls"
_OF_CALLS = (PartKind.CALL, PartKind.ARGUMENTS)
_SEPARATOR = "\n"  # between two regions of the same kind


class Splitter:
    """The split of one output. ``prompt`` may have begun the message; ``tools`` are those of the request."""

    def __init__(
        self,
        segmentation: Segmentation,
        prompt: str,
        tools: list[dict[str, Any]],
        *,
        id_style: str = "call",
        max_calls: int | None = None,
    ) -> None:
        """``max_calls``: further calls are dropped."""
        self._segmentation = segmentation
        self._budget = SearchBudget()
        self._parser = segmentation.parser(prompt, self._budget)
        self._kinds = kinds_of_text(list(segmentation.fields))
        self._tools = tools
        self._max_calls = max_calls
        self._special_texts: set[str] = set()
        self._log = CallLog(id_style)
        self._begun: set[PartKind] = set()  # kinds that have text
        self._outside: list[str] = []  # text outside all regions: the answer, if there is none within regions
        self._field = OUTSIDE
        self._region: Region = NoRegion()
        self._is_failed = False
        self._has_reasoned = False
        self._follow(self._parser.initial_events, is_prompt=True)

    @property
    def num_calls(self) -> int:
        return self._log.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Return whether the output is within its reasoning now."""
        return self._kinds.get(self._field) is PartKind.REASONING

    @property
    def has_reasoned(self) -> bool:
        """Return whether reasoning has begun, in the prompt or in the output."""
        return self._has_reasoned

    def hide(self, special_text: str) -> None:
        """Hide a special token that the output holds, unless it opens or closes a region."""
        self._special_texts.add(special_text)

    def push(self, text: str) -> list[Part]:
        """Take in more text; return the parts that it makes certain."""
        if not text:
            return []
        if self._is_failed:
            return self._region.push(self._shown(text))
        return self._kept(self._follow(self._parser.feed(text)) + self._given_up())

    def finish(self) -> list[Part]:
        """Return the last parts, once the output has ended."""
        if self._is_failed:
            return []
        rest = self._parser.unread()
        parts = self._kept(self._follow(self._parser.finish(), rest=rest) + self._given_up())
        if not (self._begun or self.num_calls or parts) and (text := self._shown("".join(self._outside)).strip()):
            parts = [Part(PartKind.CONTENT, text)]
        return parts

    def _given_up(self) -> list[Part]:
        """Pass the rest on as content if finding its regions takes too long."""
        if not self._parser.is_given_up:
            return []
        self._is_failed = True
        parts: list[Part] = []
        if self._kinds.get(self._field) is not PartKind.CONTENT:
            parts = self._region.end(is_closed=False)
            self._region = TextRegion(PartKind.CONTENT, strip=False)
        return parts + self._region.push(self._shown(self._parser.unread()))

    def _kept(self, parts: list[Part]) -> list[Part]:
        if self._max_calls is None:
            return parts
        return [part for part in parts if part.kind not in _OF_CALLS or part.index < self._max_calls]

    def _follow(self, events: list[Event], *, is_prompt: bool = False, rest: str | None = None) -> list[Part]:
        """Return the parts of ``events``. ``rest``: at the output's end, the text that wasn't in events before."""
        parts: list[Part] = []
        for number, event in enumerate(events, start=1):
            if event["type"] == "region_open":
                self._field = event["field"]
                self._has_reasoned = self._has_reasoned or self.is_reasoning
                self._region = self._opened(event, is_prompt=is_prompt)
            elif event["type"] == "region_chunk":
                if event["field"] == OUTSIDE and not is_prompt:
                    self._outside.append(event["text"])
                added = self._region.push(self._shown(event["text"]))
                self._begun |= set() if is_prompt else {part.kind for part in added}
                parts += added
            else:
                is_last = rest is not None and number == len(events)
                parts += self._region.end(is_closed=not is_last or self._is_closed(event["field"], rest or ""))
                self._field, self._region = OUTSIDE, NoRegion()
        return [] if is_prompt else parts

    def _is_closed(self, name: str, rest: str) -> bool:
        """Return whether the output's last region has its end; a region without an end of its own always has."""
        field = self._segmentation.fields.get(name)
        if field is None or field.close_re is None:
            return True
        try:
            return BoundedPattern(field.close_re).search(rest) is not None
        except TimeoutError:
            return False

    def _opened(self, event: Event, *, is_prompt: bool) -> Region:
        name = event["field"]
        kind = self._kinds.get(name)
        if kind is not None:
            field = self._segmentation.fields[name]
            separator = _SEPARATOR if field.join is None else field.join
            before = separator if kind in self._begun and not is_prompt else ""
            return TextRegion(kind, bool(field.content_args.get("strip", True)), before)
        return self._opened_call(event) if name == TOOL_CALLS else NoRegion()

    def _opened_call(self, event: Event) -> Region:
        field = self._segmentation.fields[TOOL_CALLS]
        opening, captures = event.get("opening", ""), event.get("captures", {})
        name, call_id = captures.get("name", "").strip(), captures.get("id", "")
        source = CallSource(self._segmentation, TOOL_CALLS, opening, self._tools, self._budget)
        if field.content == "xml-inline" and name:
            return TaggedArgumentsRegion(self._log, name, call_id, source)
        is_plain = field.content in ("json", "text") and not set(field.content_args) - {"allow_non_json", "strip"}
        if not is_plain:
            return WholeCallRegion(self._log, name, call_id, source)
        if name:
            return ArgumentsRegion(self._log, name, call_id)
        shown = self._shown(opening)
        return JsonCallRegion(self._log, shown if PartKind.CONTENT in self._begun else shown.lstrip())

    def _shown(self, text: str) -> str:
        for special in self._special_texts:
            text = text.replace(special, "")
        return text
