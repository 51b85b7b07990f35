"""Readers of the regions of an output: each turns the text of one region into parts of the message."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.router.output.calls import CallLog
from splitserve.router.output.json_calls import JsonCalls
from splitserve.router.output.parts import Part, PartKind
from splitserve.router.output.search_budget import SearchBudget
from splitserve.router.output.segments import Segmentation
from splitserve.router.output.tags import TagReader


@dataclass(frozen=True, slots=True)
class CallSource:
    """The field of a region with a call, the text that opened the region, the tools that have the types, and the time
    left to searches."""

    segmentation: Segmentation
    field: str
    opening: str
    tools: list[dict[str, Any]]
    budget: SearchBudget

    @property
    def content_args(self) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = self.segmentation.fields[self.field].content_args
        return arguments

    def value(self, text: str, *, typed: bool = True) -> Any:
        """Return what transformers makes of the region's ``text``; None if it can't read it. If ``typed``, arguments
        have the types that the tools give them."""
        return self.segmentation.value(self.opening + text, self.field, self.tools if typed else [])


class Region(ABC):
    """One region, from its opening to its end."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Take in more of the region's text; return what is certain."""

    @abstractmethod
    def end(self, is_closed: bool) -> list[Part]:
        """Return the rest. ``is_closed``: the region's end was in the text; else the output ended within it."""


class TextRegion(Region):
    """Content or reasoning. Whitespace at its beginning and end is dropped if ``strip``.

    ``before`` is put before the first text: what separates it from an earlier region of the same kind.
    """

    def __init__(self, kind: PartKind, strip: bool, before: str = "") -> None:
        self._kind = kind
        self._strip = strip
        self._before = before
        self._space: list[str] = []  # held until other text follows it
        self.has_text = False

    def push(self, text: str) -> list[Part]:
        if self._strip:
            shown = text.rstrip()
            if not shown:
                self._space.append(text)
                return []
            space, self._space = "".join(self._space), [text[len(shown) :]]
            text = space + shown if self.has_text else shown.lstrip()
        if not text:
            return []
        if not self.has_text:
            self.has_text = True
            text = self._before + text
        return [Part(self._kind, text)]

    def end(self, is_closed: bool) -> list[Part]:  # noqa: ARG002
        self._space = []
        return []


class NoRegion(Region):
    """Text that belongs to no part."""

    def push(self, text: str) -> list[Part]:  # noqa: ARG002
        return []

    def end(self, is_closed: bool) -> list[Part]:  # noqa: ARG002
        return []


class JsonCallRegion(Region):
    """JSON that holds names and arguments of calls. If it holds no call, its text is content."""

    def __init__(self, log: CallLog, opening: str) -> None:
        self._log = log
        self._reader = JsonCalls()
        self._texts = [opening]

    def push(self, text: str) -> list[Part]:
        if not self._reader.num_calls:
            self._texts.append(text)
        parts: list[Part] = []
        for found in self._reader.push(text):
            parts += [self._log.begin(found.name)] if found.name else [self._log.arguments(found.arguments)]
        return parts

    def end(self, is_closed: bool) -> list[Part]:
        if self._reader.num_calls:
            return []
        text = "".join(self._texts)
        text = text if is_closed else text.rstrip()  # nothing follows it
        return [Part(PartKind.CONTENT, text)] if text else []


class ArgumentsRegion(Region):
    """The arguments of one call, whose name was in the opening. They are passed on as the model wrote them."""

    def __init__(self, log: CallLog, name: str, call_id: str) -> None:
        self._log = log
        self._begun = [log.begin(name, call_id)]
        self._text = TextRegion(PartKind.CONTENT, strip=True)

    def push(self, text: str) -> list[Part]:
        begun, self._begun = self._begun, []
        return begun + [self._log.arguments(part.text) for part in self._text.push(text)]

    def end(self, is_closed: bool) -> list[Part]:
        begun, self._begun = self._begun, []
        is_empty = is_closed and not self._text.has_text
        return begun + ([self._log.arguments("{}")] if is_empty else [])


class TaggedArgumentsRegion(Region):
    """Arguments as tags, each with a key and a value, turned into an object of JSON one tag at a time.

    A value has the type that the tool's schema gives it, by transformers' parser. The first value of a key counts.
    If searching for tags takes too long, the rest is passed on as the model wrote it.
    """

    def __init__(self, log: CallLog, name: str, call_id: str, source: CallSource) -> None:
        self._log = log
        self._begun = [log.begin(name, call_id)]
        self._source = source
        self._keys: set[str] = set()
        self._tags = TagReader(source.content_args["tag_pattern"], source.budget)

    def push(self, text: str) -> list[Part]:
        return self._parts(self._tags.push(text))

    def end(self, is_closed: bool) -> list[Part]:
        parts = self._parts(self._tags.push("", is_last=True))
        rest = self._tags.take_rest()
        if is_closed and not rest.strip() and not self._tags.is_given_up:
            parts.append(self._log.arguments("}" if self._keys else "{}"))
        elif rest.strip():  # cut within a tag, or no tags at all: the model's text as it is
            parts.append(self._log.arguments(rest))
        return parts  # cut between two tags, the object stays open, as cut JSON does

    def _parts(self, tags: list[str]) -> list[Part]:
        begun, self._begun = self._begun, []
        text = "".join(map(self._new_arguments, tags))
        if self._tags.is_given_up:
            text += self._tags.take_rest()
        return begun + ([self._log.arguments(text)] if text else [])

    def _new_arguments(self, tag: str) -> str:
        pieces = []
        for key, value in self._arguments_of(tag).items():
            if key not in self._keys:
                encoded = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
                pieces.append((", " if self._keys else "{") + encoded)
                self._keys.add(key)
        return "".join(pieces)

    def _arguments_of(self, tag: str) -> Mapping[str, Any]:
        for typed in (True, False):  # a value that has no end of brackets can't be read as its type
            arguments = _arguments(self._source.value(tag, typed=typed))
            if isinstance(arguments, dict):
                return arguments
        return {}


class WholeCallRegion(Region):
    """A call in some other notation, read by transformers' parser once it is complete.

    Text that it can't read is passed on as arguments if the opening gave a name, else as content.
    """

    def __init__(self, log: CallLog, name: str, call_id: str, source: CallSource) -> None:
        self._log = log
        self._name = name
        self._call_id = call_id
        self._begun = [log.begin(name, call_id)] if name else []
        self._source = source
        self._texts: list[str] = []

    def push(self, text: str) -> list[Part]:
        begun, self._begun = self._begun, []
        self._texts.append(text)
        return begun

    def end(self, is_closed: bool) -> list[Part]:
        parts, text = self.push(""), "".join(self._texts)
        value = self._source.value(text) if is_closed else None
        calls = value if isinstance(value, list) else [value]
        if self._name:
            arguments = _arguments(calls[0]) if calls else None
            return [*parts, self._log.arguments(text if arguments is None else _encoded(arguments))]
        named = [(name, _arguments(call)) for call in calls if (name := _name(call)) is not None]
        if not named:
            return [Part(PartKind.CONTENT, text)] if (text := self._source.opening + text) else []
        for name, arguments in named:
            parts += [self._log.begin(name), self._log.arguments(_encoded({} if arguments is None else arguments))]
        return parts


def _name(call: Any) -> str | None:
    """Return the name in a call in transformers' form; None if there is none."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _arguments(call: Any) -> Any:
    """Return the arguments of a call in transformers' form; None if there are none."""
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _encoded(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def kinds_of_text(fields: Sequence[str]) -> dict[str, PartKind]:
    """Return the kind of each field that holds text; transformers' templates have several names for reasoning."""
    names = {"content": PartKind.CONTENT}
    names |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), PartKind.REASONING)
    return {name: names[name] for name in fields if name in names}
