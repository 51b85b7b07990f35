"""Reading logs that grow meanwhile."""

from pathlib import Path

_BYTES_PER_LINE = 400  # more than most have; what is cut off was asked for in vain


def read_log(path: Path, num_lines: int, offset: int) -> tuple[str, int]:
    """Whole lines of a log from ``offset`` on (-1: the last ``num_lines``), and the offset to go on from.

    One that was begun anew is read from its start; one that isn't there is empty.
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
