"""Tokens of texts word by word, from a bounded memory of words: several times cheaper than the tokenizer.

A byte-level tokenizer cuts a text into pieces by a regular expression, and encodes each piece alone. For the
expressions in use, a piece always ends between a visible ASCII character and a space before another one, whatever
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

SLICE_CHARS = 1 << 14
"""Characters that are looked up at a time: some milliseconds. Other texts wait meanwhile."""
MAX_WORDS = 1 << 17
"""Words of one generation; the last two generations are remembered."""
MAX_WORD_CHARS = 64  # a longer one is unlikely to come again

_CUT = re.compile(r" (?=[!-~])(?<=[!-~] )")
_VISIBLE = frozenset(map(chr, range(ord("!"), ord("~") + 1)))
_PLAIN_WORD = re.compile(r" [!-~](?:[^ ]*[!-~])?")

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
    before another one."""
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
    """Known tokens of a part of a text."""

    found: list[bytes]  # the packed tokens of each piece, in order; b"" for a piece of the text before, or unknown
    unknown: dict[str, list[int]]  # for each unknown text, its positions in ``found``


class WordMemory:
    """Tokens of the texts between cuts that were seen.

    Nearly all of these are words, each without its space and cut on both sides wherever it stands: a text is split at
    its spaces, and what is found among the words needs no search for cuts.
    """

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}  # without the space before them
        self._others: dict[str, bytes] = {}  # as they stand in texts
        self._old_words: dict[str, bytes] = {}
        self._old_others: dict[str, bytes] = {}

    def look_up(self, part: str) -> Lookup:
        """Return what is known of a part of a text."""
        pieces = part.split(" ")
        get = self._words.get
        found = [*map(get, pieces), None]  # the last None ends the search below
        found[0] = None  # the first piece has no space before it
        unknown: dict[str, list[int]] = {}
        end = 0
        while (position := found.index(None, end)) < len(pieces):
            begin, end = _between_cuts(pieces, position)
            text = " ".join(pieces[begin:end])
            text = f" {text}" if begin else text
            known = self._recall(text)
            found[begin:end] = [known or b"", *[b""] * (end - begin - 1)]
            if known is None:
                unknown.setdefault(text, []).append(begin)
        found.pop()
        return Lookup(cast("list[bytes]", found), unknown)

    def complete(self, lookup: Lookup, encoded: Sequence[Sequence[int]]) -> bytes:
        """Return the tokens of a part as packed int32; ``encoded`` has those of its unknown texts."""
        found = lookup.found
        if lookup.unknown:
            new = {text: array("i", ids).tobytes() for text, ids in zip(lookup.unknown, encoded, strict=True)}
            for text, positions in lookup.unknown.items():
                for position in positions:
                    found[position] = new[text]
            self._remember(new)
        return b"".join(found)

    def _recall(self, text: str) -> bytes | None:
        """Return the tokens of a text between cuts; those of the old generation are taken over, since they are used."""
        key, new, old = self._place(text)
        tokens = new.get(key)
        if tokens is None and (tokens := old.get(key)) is not None:
            new[key] = tokens
        return tokens

    def _remember(self, encoded: Mapping[str, bytes]) -> None:
        if len(self._words) + len(self._others) + len(encoded) > MAX_WORDS:
            self._old_words, self._old_others = self._words, self._others
            self._words, self._others = {}, {}
        for text, tokens in encoded.items():
            if len(text) <= MAX_WORD_CHARS:
                key, new, _ = self._place(text)
                new[key] = tokens

    def _place(self, text: str) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
        """Return the key of a text between cuts, and the generations that may have it, the new one first."""
        if _PLAIN_WORD.fullmatch(text):
            return text[1:], self._words, self._old_words
        return text, self._others, self._old_others


def _between_cuts(pieces: Sequence[str], position: int) -> tuple[int, int]:
    """Return the first and the end of the pieces around ``position`` that no cut separates; joined by spaces, they are
    the text between two cuts."""
    begin, end = position, position + 1
    while begin and not _is_cut(pieces[begin - 1], pieces[begin]):
        begin -= 1
    while end < len(pieces) and not _is_cut(pieces[end - 1], pieces[end]):
        end += 1
    return begin, end


def _is_cut(before: str, after: str) -> bool:
    """Return whether a text may be cut at the space between two pieces."""
    return before[-1:] in _VISIBLE and after[:1] in _VISIBLE


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
