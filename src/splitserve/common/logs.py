"""Logging of every process: one line per record on standard error, with the name of the process (the engine id).

A line is text, or a JSON object where the environment variable of :data:`FORMAT_VARIABLE` is "json"; child processes
inherit it. A record's attribute ``fields`` is a function that returns further values for JSON.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
FORMAT_VARIABLE = "SPLITSERVE_LOG_FORMAT"
HOLD_VARIABLE = "SPLITSERVE_HOLD_LOG"
"""Names a file: while it is there, processes write no lines below WARNING. `splitserve serve` shows its start so."""
LOG_INTERVAL_SECONDS = 1.0


class _OneLineFormatter(logging.Formatter):
    """Line breaks within a message become ``\\n``; a traceback keeps its lines, as it is read by people."""

    _second, _shown = -1, ""  # the last time, which is the next record's, too, if there are many

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, super().formatTime(record, datefmt)
        return self._shown

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")


class _JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC), level, process, logger, message, traceback if any, and its fields."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        shown: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**getattr(record, "fields", dict)(), **shown}, default=str)


class _Held(logging.Filter):
    """Drops records below WARNING while the file ``path`` is there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if record.levelno >= logging.WARNING or not self._path:
            return True
        if os.path.exists(self._path):
            return False
        self._path = ""
        return True


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs only
    """A handler that can write several records at once, for which it locks, writes and flushes once."""

    def write_at_once(self, records: Sequence[logging.LogRecord]) -> None:
        """Write records that are old enough to be late by a moment. Like any handler, it raises nothing."""
        kept = [record for record in records if self.filter(record)]
        if not kept:
            return
        try:
            text = "\n".join([self.format(record) for record in kept]) + self.terminator
            with self.lock:  # type: ignore[union-attr]  # every handler has one
                self.stream.write(text)
                self.flush()
        except Exception:
            self.handleError(kept[-1])  # as `logging` does, on standard error where that is open


def write_at_once(records: Sequence[logging.LogRecord]) -> None:
    """Write records to all handlers of this process, in order: formatting and writing many costs less than each one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Lines):
            handler.write_at_once(records)
            continue
        for record in records:
            handler.handle(record)


class RateLimitedLog:
    """A log with at most one message per ``interval_seconds``; the next message counts the suppressed ones."""

    def __init__(self, log: logging.Logger, level: int, interval_seconds: float = LOG_INTERVAL_SECONDS) -> None:
        self._log = log
        self._level = level
        self._interval_seconds = interval_seconds
        self._next_at = 0.0
        self._num_suppressed = 0

    def write(self, now: float, message: str) -> None:
        if now < self._next_at:
            self._num_suppressed += 1
            return
        more = f" ({self._num_suppressed} more like this)" if self._num_suppressed else ""
        self._log.log(self._level, "%s%s", message, more)
        self._next_at = now + self._interval_seconds
        self._num_suppressed = 0


def set_up_logging(process_name: str, level: str) -> None:
    """Send this process's records to standard error; ``level`` is one of :data:`LOG_LEVELS`."""
    handler = _Lines(sys.stderr)
    if os.environ.get(FORMAT_VARIABLE) == "json":
        handler.setFormatter(_JsonFormatter(process_name))
    else:
        handler.setFormatter(
            _OneLineFormatter(
                f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name} %(name)s: %(message)s",
                datefmt="%Y-%m-%d %H:%M:%S",
            )
        )
    handler.addFilter(_Held(os.environ.get(HOLD_VARIABLE, "")))
    # No record shows these facts of its writer, and finding them takes half of its time (the documentation of logging).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "transformers", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
