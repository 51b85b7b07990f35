"""A thread that owns an object that is not thread-safe: commands run on it, and between them it polls while busy."""

import ctypes
import logging
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


class OwnerThread(ABC):
    """Thread that runs commands, and between them :meth:`poll` as long as :attr:`is_busy`; sleeps while idle."""

    def __init__(self, name: str, poll_seconds: float) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._poll_seconds = poll_seconds
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def check(self) -> None:
        """Raise the error that ended the thread: its reads never complete, and nothing else would report that."""
        if self._failure is not None:
            raise RuntimeError(f"thread {self._thread.name} of the NIXL connector failed") from self._failure

    def close(self) -> None:
        self.submit(lambda: setattr(self, "_is_closing", True))
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("thread %s is stuck in a transfer; leaving it to the process's end", self._thread.name)

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    @property
    def poll_seconds(self) -> float:
        """Time between two polls while busy."""
        return self._poll_seconds

    @abstractmethod
    def begin(self) -> None:
        """Prepare the thread; called first, on the thread."""

    @abstractmethod
    def poll(self) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Clean up; called last, on the thread, unless it failed."""

    def _run(self) -> None:
        wait_precisely()
        try:
            self.begin()
            while not self._is_closing:
                self._take_commands()
                self.poll()
            self.finish()
        except Exception as error:
            self._failure = error

    def _take_commands(self) -> None:
        """Wait for a command: without limit when idle, for one poll interval while busy."""
        try:
            self._commands.get(timeout=self.poll_seconds if self.is_busy else None)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return


def wait_precisely() -> None:
    """Lower this thread's timer slack: Linux's default lets waits take 50 us longer than requested."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
