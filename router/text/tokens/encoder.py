"""Tokens of prompts: what was encoded before is looked up, short texts are encoded in place, long ones beside the event
loop.

A text is cut at the vocabulary's added tokens, which a tokenizer finds before anything else, so that the messages of a
chat are segments of their own: those of earlier turns are remembered. New long segments go to a child process, which
looks them up word by word (:mod:`.words`); where texts can't be cut before words, a thread encodes them as a whole.
"""

import asyncio
import json
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import cast

from tokenizers import Tokenizer

from splitserve.protocol.token_ids import TOKEN_ID_BYTES, TokenIds
from splitserve.router.text.processes.word_encoder import WordEncoder
from splitserve.router.text.tokens.file import TokenizerFile
from splitserve.router.text.tokens.words import cuts_before_words

MAX_INLINE_CHARS = 256
"""Characters that are encoded on the event loop: that takes it as long as a text's way to another process and back."""
MAX_REMEMBERED_BYTES = 64 << 20
_ENTRY_BYTES = 256  # of a remembered segment, beside its text and tokens
MAX_ADDED_TOKENS = 512
"""Number of added tokens up to which a text is cut at them: the search takes time in proportion."""


class TextEncoder:
    """The tokens of texts, as :meth:`Tokenizer.encode` finds them.

    A child process, which reads ``file`` for itself, encodes long ones, and ``pool`` those that it can't.
    """

    def __init__(self, tokenizer: Tokenizer, file: TokenizerFile, pool: Executor) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        added = _cutting_tokens(tokenizer)
        # The group makes a split include what it cuts at.
        self._cut = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        self.words = WordEncoder(file, self._whole) if cuts_before_words(tokenizer) else None
        packed = {text: array("i", (token_id,)).tobytes() for text, token_id in added.items()}
        self._segments = SegmentMemory(MAX_REMEMBERED_BYTES, {"": b"", **packed})
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
        pieces = [text] if self._cut is None else self._cut.split(text)
        found = self._segments.recall(pieces)
        if None in found:
            await self._complete(found, pieces, check)
        token_ids = array("i", around[0])
        token_ids.frombytes(b"".join(cast("list[bytes]", found)))
        token_ids.extend(around[1])
        check(len(token_ids))
        return token_ids

    async def _complete(self, found: list[bytes | None], pieces: Sequence[str], check: Callable[[int], None]) -> None:
        """Encode the segments that aren't known, in their order."""
        num_tokens = sum(len(packed) for packed in found if packed is not None) // TOKEN_ID_BYTES
        for index, piece in enumerate(pieces):
            if found[index] is None:
                check(num_tokens)
                packed = found[index] = await self._segment(piece, num_tokens, check)
                num_tokens += len(packed) // TOKEN_ID_BYTES

    async def _segment(self, text: str, num_before: int, check: Callable[[int], None]) -> bytes:
        if self.words is None or len(text) <= MAX_INLINE_CHARS:
            token_ids = await self._whole(text, check)
        else:
            token_ids = await self.words.encode(text, num_before, check)
        packed = token_ids.tobytes()
        self._segments.put(text, packed)
        return packed

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
    """Packed tokens of the texts that were used last, bounded by the memory that they take; those of ``fixed`` are
    always known.

    It has two generations of at most half of ``max_bytes``: a used text is in the new one.
    """

    def __init__(self, max_bytes: int, fixed: Mapping[str, bytes]) -> None:
        self._generation_bytes = max_bytes // 2
        self._fixed = fixed
        self._new: dict[str, bytes] = {**fixed}
        self._old: dict[str, bytes] = {}
        self._num_bytes = 0  # of the new generation

    def recall(self, texts: Sequence[str]) -> list[bytes | None]:
        """Return each text's tokens, or None."""
        found = [*map(self._new.get, texts)]
        if None in found:
            for index, text in enumerate(texts):
                if found[index] is None and (packed := self._old.get(text)) is not None:
                    found[index] = packed
                    self.put(text, packed)
        return found

    def put(self, text: str, packed: bytes) -> None:
        num_bytes = _ENTRY_BYTES + sys.getsizeof(text) + len(packed)
        if text in self._new or num_bytes > self._generation_bytes:
            return
        if self._num_bytes + num_bytes > self._generation_bytes:
            self._old, self._new, self._num_bytes = self._new, {**self._fixed}, 0
        self._new[text] = packed
        self._num_bytes += num_bytes


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
