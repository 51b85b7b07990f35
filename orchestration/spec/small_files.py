"""Reading of small files (cluster specs, secrets) with bounds in size and time.

Regular files and pipes are read, so that a shell's ``<(command)`` works; devices, directories and sockets are refused.
"""

import os
import select
import stat
import time

from splitserve.common.errors import ConfigError

PIPE_SECONDS = 10.0
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


def read_small_file(path: str, max_bytes: int) -> bytes:
    """Return the content of ``path``. Raises :class:`ConfigError` if it isn't a file or pipe, is larger than
    ``max_bytes``, or is a pipe that stays open for :data:`PIPE_SECONDS`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
            raise ConfigError(f"{path} is {kind}; give a file or a pipe of at most {max_bytes} bytes")
        content = _read(fd, path, max_bytes + 1, is_pipe=stat.S_ISFIFO(mode))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
    finally:
        os.close(fd)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than the {max_bytes} bytes allowed; is it the right file?")
    return content


def _read(fd: int, path: str, max_bytes: int, *, is_pipe: bool) -> bytes:
    """Read at most ``max_bytes``. The descriptor doesn't block: a pipe without a writer must not block a command."""
    deadline = time.monotonic() + PIPE_SECONDS
    content = b""
    while len(content) < max_bytes:
        if is_pipe and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ConfigError(f"{path}: its writer sent no end within {PIPE_SECONDS:g} s; {len(content)} bytes came")
        part = os.read(fd, max_bytes - len(content))
        if not part:
            break
        content += part
    return content
