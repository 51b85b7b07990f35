"""Stream that shows how long a router's event loop is blocked."""

import json
import socket
import threading
import time

READ_SECONDS = 60.0


class Canary(threading.Thread):
    """Stream that is read as it arrives; ``longest_gap_seconds`` is the longest time between two reads.

    A stream that breaks off counts as a gap of :data:`READ_SECONDS`.
    """

    def __init__(self, address: tuple[str, int], model: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.reset()
        self.warmed_up = threading.Event()
        self._closing = threading.Event()
        body = {"model": model, "prompt": [5, 6, 7], "stream": True, "ignore_eos": True}
        data = json.dumps(body | {"max_tokens": num_tokens}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self._connection = socket.create_connection(address, timeout=READ_SECONDS)

    def reset(self) -> None:
        """Forget the gaps until now."""
        self._last = time.monotonic()
        self.longest_gap_seconds = 0.0

    def settle(self) -> float:
        """Return the longest gap since :meth:`reset` in seconds, the one that is still open included."""
        return max(self.longest_gap_seconds, time.monotonic() - self._last)

    def run(self) -> None:
        self._connection.sendall(self._request)
        self._last = time.monotonic()
        num_reads = 0
        while not self._closing.is_set():
            try:
                is_broken = not self._connection.recv(65536)
            except OSError:
                is_broken = True
            now = time.monotonic()
            gap = READ_SECONDS if is_broken else now - self._last
            if is_broken and self._closing.is_set():
                return
            self.longest_gap_seconds = max(self.longest_gap_seconds, gap)
            if is_broken:
                return
            self._last = now
            num_reads += 1
            if num_reads == 20:
                self.warmed_up.set()

    def close(self) -> None:
        """End the stream, and with it the thread."""
        self._closing.set()
        self.join()
        self._connection.close()
