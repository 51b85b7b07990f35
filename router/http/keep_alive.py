"""Comments in a stream that has no tokens for a while, so that clients and proxies keep its connection."""

import asyncio
from collections.abc import Callable

KEEP_ALIVE = b": keep-alive\n\n"


class Pulse:
    """Timer that calls ``on_silence`` after each ``seconds`` in which no bytes were sent; 0: never."""

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_silence = on_silence
        self._has_sent = False
        self._timer = self._loop.call_later(seconds, self._beat) if seconds else None

    def note_sent(self) -> None:
        """Note that bytes were sent: the current interval is not silent."""
        self._has_sent = True

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if not self._has_sent:
            self._on_silence()
        self._has_sent = False
        self._timer = self._loop.call_later(self._seconds, self._beat)
