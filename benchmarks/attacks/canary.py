"""Stream that shows how long a router's event loop is blocked."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

READ_SECONDS = 60.0


class Canary(threading.Thread):
    """Stream that is read as it arrives; ``longest_gap_seconds`` is the longest time between two reads.

    ``pids``: processes whose main threads carry the stream. The time in which they or this thread were ready to run,
    but had no core, says how busy the machine is, not what the router does: ``longest_stop_seconds`` is the longest gap
    without it. A stream that breaks off counts as a gap of :data:`READ_SECONDS`.
    """

    def __init__(self, address: tuple[str, int], model: str, num_tokens: int, pids: Sequence[int] = ()) -> None:
        super().__init__(daemon=True)
        self._threads = [Path(f"/proc/{pid}/schedstat") for pid in pids]
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
        self._last, self._waited = time.monotonic(), self._seconds_without_core()
        self.longest_gap_seconds = self.longest_stop_seconds = 0.0

    def settle(self) -> float:
        """Return the longest stop since :meth:`reset` in seconds, the one that is still open included."""
        waited = self._seconds_without_core() - self._waited
        return max(self.longest_stop_seconds, time.monotonic() - self._last - waited)

    def run(self) -> None:
        self._threads.append(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat"))
        self._waited = self._seconds_without_core()
        self._connection.sendall(self._request)
        self._last = time.monotonic()
        num_reads = 0
        while not self._closing.is_set():
            try:
                is_broken = not self._connection.recv(65536)
            except OSError:
                is_broken = True
            now, waited = time.monotonic(), self._seconds_without_core()
            gap = READ_SECONDS if is_broken else now - self._last
            if is_broken and self._closing.is_set():
                return
            stop = gap if is_broken else gap - (waited - self._waited)
            self.longest_gap_seconds = max(self.longest_gap_seconds, gap)
            self.longest_stop_seconds = max(self.longest_stop_seconds, stop)
            if is_broken:
                return
            self._last, self._waited = now, waited
            num_reads += 1
            if num_reads == 20:
                self.warmed_up.set()

    def _seconds_without_core(self) -> float:
        """Return how long the threads have been ready to run without a core, in all; 0 of one that has ended."""
        nanoseconds = 0
        for path in self._threads:
            with suppress(OSError):  # ended: the stream breaks off, too
                nanoseconds += int(path.read_text().split()[1])
        return nanoseconds / 1e9

    def close(self) -> None:
        """End the stream, and with it the thread."""
        self._closing.set()
        self.join()
        self._connection.close()
