"""Time limits of searches by the patterns of response templates, which come with checkpoints: some take for ever on
some text."""

import time
from types import TracebackType
from typing import Any

SEARCH_SECONDS = 0.1
"""Time limit of one search."""

OUTPUT_SECONDS = 1.0
"""Time limit of all slow searches of one output together."""

_ORDINARY_SECONDS = 1e-3  # of the searches for one piece of text; only what exceeds it counts


class BoundedPattern:
    """A compiled pattern whose searches have a time limit. They raise TimeoutError."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.groupindex = pattern.groupindex

    def search(self, text: str, pos: int = 0, partial: bool = False) -> Any:
        return self.pattern.search(text, pos, partial=partial, timeout=SEARCH_SECONDS)

    def match(self, text: str, pos: int = 0, partial: bool = False) -> Any:
        return self.pattern.match(text, pos, partial=partial, timeout=SEARCH_SECONDS)

    def finditer(self, text: str) -> Any:
        return self.pattern.finditer(text, timeout=SEARCH_SECONDS)


class SearchBudget:
    """Processor time left to the slow searches of one output: ``with budget:`` surrounds the searches for one piece of
    text, and raises TimeoutError if none is left."""

    def __init__(self) -> None:
        self._left_seconds = OUTPUT_SECONDS
        self._began = 0.0

    def __enter__(self) -> None:
        if self._left_seconds < 0.0:
            raise TimeoutError(f"the searches of one output took {OUTPUT_SECONDS} s")
        self._began = time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left_seconds -= max(0.0, time.thread_time() - self._began - _ORDINARY_SECONDS)
