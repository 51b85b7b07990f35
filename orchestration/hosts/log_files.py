"""Log files of processes without a terminal: opened, truncated while they are written, read."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

MAX_LOG_BYTES = 16 << 20
LOG_CHECK_SECONDS = 5.0
_BYTES_PER_LINE = 400  # more than most lines have; bytes beyond that are read for nothing


def read_log(path: Path, num_lines: int, offset: int) -> tuple[str, int]:
    """Return whole lines of a log from ``offset`` on (-1: the last ``num_lines``), and the offset to continue from.

    A log that was truncated is read from its start; one that doesn't exist is empty.
    """
    if not path.exists():
        return "", 0
    with path.open("rb") as log:
        size = log.seek(0, 2)
        if offset < 0:
            log.seek(max(0, size - _BYTES_PER_LINE * num_lines))
        else:
            log.seek(offset if offset <= size else 0)
        start = log.tell()
        data = log.read()
    end = data.rfind(b"\n") + 1
    lines = data[:end].decode(errors="replace").splitlines(keepends=True)
    chosen = lines if offset >= 0 else lines[max(0, len(lines) - num_lines) :]
    return "".join(chosen), start + end


@contextmanager
def open_log(path: Path | None) -> Iterator[IO[bytes] | None]:
    """Open a log file to append to, truncated first if it is long; yields None for no path."""
    if path is None:
        yield None
        return
    begin_anew_if_long(path)
    with path.open("ab") as log:
        yield log


def begin_anew_if_long(path: Path) -> None:
    """Move the content of a log of more than :data:`MAX_LOG_BYTES` to ``*.1``, which it replaces.

    Processes that have the log open to append continue at its start. What they write during the move is lost.
    """
    with suppress(FileNotFoundError), path.open("r+b") as log:
        if os.fstat(log.fileno()).st_size <= MAX_LOG_BYTES:
            return
        old = path.with_name(f"{path.name}.1")
        with old.open("wb") as copy:
            shutil.copyfileobj(log, copy)
            copy.write(log.read())  # lines that were written meanwhile
            log.truncate(0)


def keep_short(path: Path, ended: threading.Event) -> None:
    """Start a thread that truncates a growing log, until ``ended`` is set."""

    def watch() -> None:
        while not ended.wait(LOG_CHECK_SECONDS):
            with suppress(OSError):  # for example a full disk: the next attempt may succeed
                begin_anew_if_long(path)

    threading.Thread(target=watch, name=f"log-{path.stem}", daemon=True).start()
