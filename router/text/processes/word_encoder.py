"""Tokens of long texts from a child process: the event loop only cuts a text into parts, and joins their tokens."""

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TypeAlias

import msgspec

from splitserve.protocol.token_ids import TokenIds
from splitserve.router.text.processes import word_process
from splitserve.router.text.processes.kept import KeptProcess, Program
from splitserve.router.text.tokens.file import TokenizerFile
from splitserve.router.text.tokens.words import slices

REPLY_SECONDS = 5.0  # between two replies; a part takes some milliseconds
PARTS_AHEAD = 2
"""Parts of a text that are sent before their replies: one is in work, one waits for it. So texts share the process."""
MAX_PART_CHARS = 1 << 16  # a part that can't be cut may be longer: others would wait for it

Check: TypeAlias = Callable[[int], None]
InPlace: TypeAlias = Callable[[str, Check], Awaitable[TokenIds]]


class WordEncoder:
    """Tokens of texts that may be cut before words. For use on the event loop.

    Parts that the process can't do (it is starting, ended or hangs, or a part is too long) are encoded by ``in_place``.
    """

    def __init__(self, file: TokenizerFile, in_place: InPlace) -> None:
        program = Program(word_process.__name__, "tokenises texts", msgspec.msgpack.encode(file))
        self._process = KeptProcess(program, self._on_message, self._on_end)
        self._in_place = in_place
        self.is_ready = False  # parts go to the process
        self._waiting: deque[asyncio.Future[bytes | None]] = deque()  # for replies, in the order of the parts
        self._timer: asyncio.TimerHandle | None = None  # runs while replies are awaited

    @property
    def num_waiting(self) -> int:
        """The number of parts whose replies haven't come."""
        return len(self._waiting)

    def start(self) -> None:
        """Start the process; texts needn't wait for it."""
        self._process.start()

    def close(self) -> None:
        """End the process. Texts in flight get no tokens."""
        self._process.close()
        if self._timer is not None:
            self._timer.cancel()

    async def encode(self, text: str, num_before: int, check: Check) -> TokenIds:
        """Return the tokens of a text that follows ``num_before`` tokens. ``check`` is called with the number of tokens
        found so far, and may raise."""
        token_ids = array("i")
        parts = slices(text)
        ahead = deque((part, self._sent(part)) for part in islice(parts, PARTS_AHEAD))
        while ahead:
            part, reply = ahead.popleft()
            packed = await reply
            if packed is None:
                token_ids.extend(await self._in_place(part, check))
            else:
                token_ids.frombytes(packed)
            check(num_before + len(token_ids))
            ahead.extend((part, self._sent(part)) for part in islice(parts, 1))
        return token_ids

    def _sent(self, part: str) -> "asyncio.Future[bytes | None]":
        """Send a part to the process. Its reply is None if the process can't do it."""
        reply: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        if self.is_ready and len(part) <= MAX_PART_CHARS:
            self._process.send(part.encode())
            self._waiting.append(reply)
            if self._timer is None:
                self._watch()
        else:
            reply.set_result(None)
        return reply

    def _on_message(self, content: bytes) -> None:
        if not self.is_ready:
            self.is_ready = True
            return
        _answer(self._waiting.popleft(), content)
        self._watch()

    def _on_end(self) -> None:
        self.is_ready = False
        while self._waiting:
            _answer(self._waiting.popleft(), None)
        self._watch()

    def _watch(self) -> None:
        """End the process unless the next reply comes in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(REPLY_SECONDS, self._process.kill)


def _answer(reply: "asyncio.Future[bytes | None]", packed: bytes | None) -> None:
    if not reply.done():  # else its request was cancelled
        reply.set_result(packed)
