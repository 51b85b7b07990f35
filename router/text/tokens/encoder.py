"""Tokens of prompts: what was encoded before is looked up, short texts are encoded in place, long ones beside the event
loop.

A text is cut at the vocabulary's added tokens, which a tokenizer finds before anything else, so that the messages of a
chat are segments of their own: those of earlier turns are remembered. New long segments go to a child process, which
looks them up word by word (:mod:`.words`); where texts can't be cut before words, a thread encodes them as a whole.
"""

import asyncio
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from tokenizers import Tokenizer

from splitserve.protocol.token_ids import TOKEN_ID_BYTES, TokenIds
from splitserve.router.text.processes.word_encoder import WordEncoder
from splitserve.router.text.tokens.file import TokenizerFile
from splitserve.router.text.tokens.words import cuts_before_words

MAX_INLINE_CHARS = 256
"""Characters that are encoded on the event loop: that takes it as long as a text's way to another process and back."""
MAX_REMEMBERED_BYTES = 64 << 20
_ENTRY_BYTES = 256  # of a remembered segment, beside its characters and tokens
MAX_ADDED_TOKENS = 512
"""Number of added tokens up to which a text is cut at them: the search takes time in proportion."""


class TextEncoder:
    """The tokens of texts, as :meth:`Tokenizer.encode` finds them.

    A child process, which reads ``file`` for itself, encodes long ones, and ``pool`` those that it can't.
    """

    def __init__(self, tokenizer: Tokenizer, file: TokenizerFile, pool: Executor) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._added = _cutting_tokens(tokenizer)
        self._cut = re.compile("|".join(map(re.escape, self._added))) if self._added else None
        self.words = WordEncoder(file, self._whole) if cuts_before_words(tokenizer) else None
        self._segments = SegmentMemory(MAX_REMEMBERED_BYTES)
        self._around = _special_tokens_around(tokenizer)

    def start(self) -> None:
        """Start the child process; until it is ready ``pool`` does its work."""
        if self.words is not None:
            self.words.start()

    def close(self) -> None:
        """End the child process."""
        if self.words is not None:
            self.words.close()

    async def encode(self, text: str, *, add_special_tokens: bool, check: Callable[[int], None]) -> TokenIds:
        """Return the tokens of ``text``, with those that the post-processor adds if ``add_special_tokens``.

        ``check`` is called with the number of tokens found so far, and may raise.
        """
        around = self._around if add_special_tokens else ((), ())
        if around is None:  # the post-processor does more than to put tokens around the text's
            return await self._whole(text, check, add_special_tokens=True)
        token_ids = array("i", around[0])
        for segment in self._split(text):
            if isinstance(segment, int):
                token_ids.append(segment)
            else:
                token_ids.extend(await self._segment(segment, len(token_ids), check))
                check(len(token_ids))
        token_ids.extend(around[1])
        check(len(token_ids))
        return token_ids

    def _split(self, text: str) -> Iterator[str | int]:
        """Yield the segments of a text, and the added tokens between them."""
        end = 0
        for match in () if self._cut is None else self._cut.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self._added[match[0]]
            end = match.end()
        if end < len(text):
            yield text[end:]

    async def _segment(self, text: str, num_before: int, check: Callable[[int], None]) -> TokenIds:
        found = self._segments.get(text)
        if found is not None:
            return found
        if self.words is None or len(text) <= MAX_INLINE_CHARS:
            token_ids = await self._whole(text, check)
        else:
            token_ids = await self.words.encode(text, num_before, check)
        self._segments.put(text, token_ids)
        return token_ids

    async def _whole(self, text: str, check: Callable[[int], None], *, add_special_tokens: bool = False) -> TokenIds:
        def encode() -> TokenIds:
            # Only the batch call releases the GIL; "fast" leaves out offsets.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            check(len(encoding))  # a list of millions would hold the interpreter
            return array("i", encoding.ids)

        if len(text) <= MAX_INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)


class SegmentMemory:
    """Tokens of the texts that were used last; bounded by the memory that they take."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[str, TokenIds] = OrderedDict()

    def get(self, text: str) -> TokenIds | None:
        found = self._known.get(text)
        if found is not None:
            self._known.move_to_end(text)
        return found

    def put(self, text: str, token_ids: TokenIds) -> None:
        if text in self._known:
            return
        self._known[text] = token_ids
        self._num_bytes += _size(text, token_ids)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._known.popitem(last=False))


def _size(text: str, token_ids: TokenIds) -> int:
    return _ENTRY_BYTES + 4 * len(text) + TOKEN_ID_BYTES * len(token_ids)  # a character takes four bytes at most


def _cutting_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the added tokens, the longest first, if a text may be cut at them; {} if its parts may have other tokens
    than the text."""
    parts = json.loads(tokenizer.to_str())
    added = parts["added_tokens"]
    is_plain = not any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"] for token in added
    )
    # Such a pre-tokenizer may treat the beginning of a text differently.
    looks_at_beginning = "Metaspace" in json.dumps(parts["pre_tokenizer"]) or _adds_space(parts["pre_tokenizer"])
    if not is_plain or looks_at_beginning or len(added) > MAX_ADDED_TOKENS:
        return {}
    by_length = sorted(added, key=lambda token: -len(token["content"]))
    return {token["content"]: token["id"] for token in by_length if token["content"]}


def _adds_space(pre_tokenizer: object) -> bool:
    return '"add_prefix_space": true' in json.dumps(pre_tokenizer)


def _special_tokens_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the tokens that the post-processor puts before and after those of a text; None if it does something
    else."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    found = tokenizer.encode("a", add_special_tokens=True).ids
    empty = tokenizer.encode("", add_special_tokens=True).ids
    for begin in range(len(found) - len(plain) + 1):
        before, inside, after = found[:begin], found[begin : begin + len(plain)], found[begin + len(plain) :]
        if inside == plain and empty == before + after:
            return tuple(before), tuple(after)
    return None
