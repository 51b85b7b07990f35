"""Phases of a worker's start that run in a thread beside another one."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """Call of ``run`` in a thread called ``name``, which begins when this object is created. The thread is a daemon: it
    doesn't keep the process from ending."""

    def __init__(self, name: str, run: Callable[[], Result]) -> None:
        self._run = run
        self._results: list[Result] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> Result:
        """Wait until the call is over; returns its result. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _call(self) -> None:
        try:
            self._results.append(self._run())
        except Exception as error:
            self._error = error
