"""A stream that measures the router's event loop: the longest gap between its tokens. Not a test module.

``python tests/canary.py`` prints a table of all attacks: answers, the longest gap, the router's memory.
"""

import http.client
import json
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from hostile_bodies import ATTACKS
from router_harness import RouterProcess, write_model_dir
from waiting import PATIENCE_SECONDS, wait_until

TOKEN_SECONDS = 0.01
_NUM_TOKENS = 100_000


@contextmanager
def paced_worker(membership: str) -> Iterator[None]:
    """A mixed worker in a process of its own, whose streams get a token each :data:`TOKEN_SECONDS`."""
    command = [sys.executable, "-m", "splitserve.benchmarks.instant_worker", "--membership", membership]
    command += ["--tokens-per-message", "1", "--token-seconds", str(TOKEN_SECONDS), "--vocab-size", "400"]
    command += ["--max-model-len", str(_NUM_TOKENS + 1000)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Canary:
    """One stream, read by a thread. ``longest_gap``: seconds between two of its tokens, since :meth:`reset`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=PATIENCE_SECONDS)
        body = {"model": "tiny", "prompt": [5], "max_tokens": _NUM_TOKENS, "stream": True, "ignore_eos": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.reset()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.last = time.monotonic()
        self.longest_gap = 0.0

    def settle(self) -> float:
        """The longest gap, the one that is still open included."""
        return max(self.longest_gap, time.monotonic() - self.last)

    def close(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self._connection.close()

    def _read(self) -> None:
        try:
            while self._response.readline():
                now = time.monotonic()
                self.longest_gap, self.last = max(self.longest_gap, now - self.last), now
        except (OSError, http.client.HTTPException):
            return  # its router has ended, or :meth:`close` has cut a chunk in two


def send(address: tuple[str, int], request: bytes, seconds: float = PATIENCE_SECONDS) -> str:
    """The status of the answer; "closed" for none, "nothing" when there is none in time."""
    deadline = time.monotonic() + seconds
    answer = b""
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.setblocking(False)
        left = memoryview(request)
        while b"\r\n" not in answer:
            wait = deadline - time.monotonic()
            readable, writable, _ = select.select([connection], [connection] if left else [], [], max(0.0, wait))
            try:
                if readable:
                    piece = connection.recv(65536)
                    if not piece:
                        return "closed"
                    answer += piece
                elif writable:
                    left = left[connection.send(left) :]
                else:
                    return "nothing"
            except ConnectionError:
                return "closed"
    return answer.split(b" ", 2)[1].decode()


def attack(address: tuple[str, int], request: bytes, times: int) -> list[str]:
    """The answers to ``request``, sent ``times`` at once."""
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(send(address, request))) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@contextmanager
def guarded_router(model_dir: Path, **settings: object) -> Iterator[tuple[RouterProcess, Canary]]:
    """A router with one worker and a canary's stream through it."""
    router = RouterProcess(model_dir, **settings)
    try:
        with paced_worker(router.membership):
            wait_until(lambda: router.request("GET", "/ready")[0] == 200)
            canary = Canary(router.address)
            time.sleep(1.0)  # the worker makes all of its replies at first
            yield router, canary
            canary.close()
    finally:
        router.stop()


class PeakMemory:
    """The largest resident memory of a process in MiB, and that of its children, while it is open."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.own, self.children = 0, 0

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.own = max(self.own, self._process.memory_info().rss >> 20)
            sizes = []
            for child in self._process.children():
                try:
                    sizes.append(child.memory_info().rss >> 20)
                except psutil.NoSuchProcess:
                    continue
            self.children = max(self.children, sum(sizes))


def table(attacks: Mapping[str, Callable[[], bytes]], times: Sequence[int], model_dir: Path) -> Iterator[str]:
    """A line for each attack: how often at once, answers, the longest gap in ms, peak memory."""
    yield f"{'attack':38s} {'times':>5s} {'answers':24s} {'gap ms':>8s} {'MiB':>6s} {'children':>8s}"
    with guarded_router(model_dir) as (router, canary):
        canary.reset()
        time.sleep(2.0)
        yield f"{'nothing':38s} {0:5d} {'':24s} {canary.settle() * 1e3:8.0f}"
        for name, make in attacks.items():
            request = make()
            for count in times:
                with PeakMemory(router.process.pid) as memory:
                    canary.reset()
                    answers = attack(router.address, request, count)
                    time.sleep(0.1)
                    gap = canary.settle() * 1e3
                codes = " ".join(f"{code}x{number}" for code, number in sorted(Counter(answers).items()))
                yield f"{name:38s} {count:5d} {codes:24s} {gap:8.0f} {memory.own:6d} {memory.children:8d}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_model_dir(Path(folder))
        chosen = {
            name: make for name, make in ATTACKS.items() if not sys.argv[1:] or any(a in name for a in sys.argv[1:])
        }
        for row in table(chosen, (1, 8), Path(folder)):
            print(row, flush=True)
