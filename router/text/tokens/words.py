"""Tokens of texts word by word, from a bounded memory of words: several times cheaper than the tokenizer.

A byte-level tokenizer cuts a text into pieces by a regular expression, and encodes each piece alone. For the
expressions in use, a piece always ends between a visible ASCII character and a space before an ASCII letter, whatever
stands around them. So a text may be cut there, and the tokens of its parts are the tokens of the text.
:func:`cuts_before_words` says for which tokenizers this holds; for all others there is no such memory.
"""

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer

from splitserve.protocol.token_ids import TokenIds, from_bytes

SLICE_CHARS = 1 << 14
"""Characters that are looked up at a time: a few milliseconds at most."""
MAX_WORDS = 1 << 18
MAX_WORD_CHARS = 64  # a longer one is unlikely to come again

_CUT = re.compile(r" (?=[A-Za-z])(?<=[!-~] )")
_BEGINS_WORD = re.compile(" [A-Za-z]")
_BARE = "\x00"

# Alternatives of expressions that cut texts into pieces. None of them matches both a visible ASCII character and a
# space after it, and none looks at what stands before its match.
_WORD = r"\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SAFE = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS, r"'(?i:[sdmt]|ll|ve|re)"),
        *(rf" ?{_WORD}", rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}"),
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{first}{_LOWER}{second}{end}"
            for first, second in (("*", "+"), ("+", "*"))
            for end in ("", _ENDINGS + "?")
        ),
        *(r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    }
)


def cuts_before_words(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a text are those of its parts, cut between a visible ASCII character and a space
    before an ASCII letter."""
    parts = json.loads(tokenizer.to_str())
    normalizer, model = parts["normalizer"], parts["model"]
    is_byte_level_bpe = model["type"] == "BPE" and not model.get("dropout") and _has_byte_level(parts["pre_tokenizer"])
    leaves_words = normalizer is None or normalizer["type"] == "NFC"
    return is_byte_level_bpe and leaves_words and not any(map(_spans_a_cut, parts["added_tokens"]))


def _has_byte_level(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether texts are cut by safe expressions only, and their bytes are tokenized."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return False
    if len(steps) == 1:
        return bool(steps[-1]["use_regex"])  # GPT-2's expression
    return not steps[-1]["use_regex"] and all(map(_is_safe_split, steps[:-1]))


def _is_safe_split(step: Mapping[str, Any]) -> bool:
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return False
    expression = step["pattern"].get("Regex")
    return expression is not None and all(each in _SAFE for each in _alternatives(expression))


def _alternatives(expression: str) -> list[str]:
    """Return the alternatives of a regular expression, not those within its groups and sets."""
    found, depth, begin, position = [], 0, 0, 0
    while position < len(expression):
        char = expression[position]
        if char == "\\":
            position += 1
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "|" and not depth:
            found.append(expression[begin:position])
            begin = position + 1
        position += 1
    return [*found, expression[begin:]]


def _spans_a_cut(token: Mapping[str, Any]) -> bool:
    """Return whether an added token may take text from both sides of a cut."""
    content = token["content"]
    looks_around = token["lstrip"] or token["rstrip"] or token["single_word"]
    return bool(looks_around or _CUT.search(content) or content.startswith(" ") or content.endswith(" "))


@dataclass(frozen=True, slots=True)
class Lookup:
    """The words of a part of a text, the packed tokens of each, and the positions of those that are unknown."""

    words: list[str]
    found: list[bytes | None]
    unknown: list[int]

    @property
    def missing(self) -> list[str]:
        """The words without known tokens, each once."""
        return list(dict.fromkeys([self.words[position] for position in self.unknown]))


class WordMemory:
    """Tokens of the words that were seen. A word stands for itself after a space; text before the first word is marked
    by :data:`_BARE`."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def look_up(self, part: str) -> Lookup:
        """Return the words of a part of a text."""
        words = _CUT.split(part)
        words[0] = words[0][1:] if _BEGINS_WORD.match(part) else _BARE + words[0]
        get = self._known.get
        found = [get(word) for word in words]
        unknown = [position for position, tokens in enumerate(found) if tokens is None] if None in found else []
        return Lookup(words, found, unknown)

    def complete(self, lookup: Lookup, encoded: Sequence[Sequence[int]]) -> TokenIds:
        """Return the tokens of a part; ``encoded`` has those of its missing words, as :func:`text_of` spells them."""
        found = lookup.found
        if lookup.unknown:
            new = dict(zip(lookup.missing, (array("i", ids).tobytes() for ids in encoded), strict=True))
            for position in lookup.unknown:
                found[position] = new[lookup.words[position]]
            self._remember(new)
        return from_bytes(b"".join(cast("list[bytes]", found)))

    def _remember(self, new: Mapping[str, bytes]) -> None:
        if len(self._known) + len(new) > MAX_WORDS:
            self._known.clear()  # common words are back soon
        self._known.update((word, tokens) for word, tokens in new.items() if len(word) <= MAX_WORD_CHARS)


def text_of(word: str) -> str:
    """Return the text that a word of a :class:`Lookup` stands for."""
    return word[1:] if word.startswith(_BARE) else f" {word}"


def slices(text: str) -> Iterator[str]:
    """Yield the parts of a text whose tokens, one after the other, are those of the text."""
    begin = 0
    while len(text) - begin > SLICE_CHARS:
        cut = _CUT.search(text, begin + SLICE_CHARS)
        if cut is None:
            break
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]
