"""The sending of a rank's events to rank 0."""

import contextlib
import select
import threading
from collections import deque
from multiprocessing.connection import Connection

DIRECT_BYTES = 4096
"""The longest event that is sent at once: Linux calls a socket writable while three quarters of its buffer are free,
and that has 200 KB by default."""


class EventSender:
    """Sender of events to rank 0, in order, which never keeps its caller waiting until rank 0 receives them.

    Rank 0 waits until its commands are received, and meanwhile receives no events: if the rank waited for its events to
    be received before it takes the next command, both would wait for good. Events that the socket has no room for are
    therefore sent by a thread. All others are sent at once, because a thread may have to wait for the GIL.
    """

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._room = select.poll()
        self._room.register(channel.fileno(), select.POLLOUT)
        self._unsent: deque[bytes | None] = deque()
        self._num_unsent = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._send_rest, name="rank-events", daemon=True)
        self._thread.start()

    def send(self, event: bytes) -> None:
        """Send an encoded event. Called by one thread at a time. Raises OSError if rank 0 is gone."""
        if not self._unsent and len(event) <= DIRECT_BYTES and self._room.poll(0):
            self._channel.send_bytes(event)
        else:
            self._leave_to_thread(event)

    def close(self, timeout_seconds: float) -> None:
        """Wait until all events are sent or rank 0 is gone, for ``timeout_seconds`` at most."""
        self._leave_to_thread(None)
        self._thread.join(timeout_seconds)

    def _leave_to_thread(self, event: bytes | None) -> None:
        self._unsent.append(event)
        self._num_unsent.release()

    def _send_rest(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: the thread that receives its commands notices
            while True:
                self._num_unsent.acquire()
                event = self._unsent[0]  # it stays there while it is being sent: no later one overtakes it
                if event is None:
                    return
                self._channel.send_bytes(event)
                self._unsent.popleft()
