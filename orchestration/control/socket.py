"""Socket for requests to a cluster on this machine: a Unix socket that only its user can open, one JSON line each
way."""

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from splitserve.common.errors import ConfigError, WireError
from splitserve.orchestration.control.requests import (
    AnyReply,
    AnyRequest,
    Refused,
    decode_reply,
    decode_request,
    encode,
)

MAX_LINE_BYTES = 1 << 20
_READ_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_MAX_PATH_BYTES = 100  # the limit of sun_path, less a few

_log = logging.getLogger(__name__)


class ControlServer:
    """Server on a thread of its own that answers one connection at a time with the result of ``ask``.

    Raises :class:`ConfigError` for a path that can't be bound.
    """

    def __init__(self, path: Path, ask: Callable[[AnyRequest], AnyReply]) -> None:
        self._path = path
        self._ask = ask
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _check_length(path)
            previous = os.umask(0o177)  # no other user may connect, from the socket's first moment on
            try:
                self._socket.bind(str(path))
            finally:
                os.umask(previous)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"can't bind {path}: {error.strerror or error}") from error
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    self._answer(connection)
                except OSError as error:
                    _log.debug("a control connection broke: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_READ_SECONDS)
        if not _is_same_user(connection):
            connection.sendall(encode(Refused("only the user that started the cluster may control it")) + b"\n")
            return
        line = _read_line(connection)
        if not line:
            return
        try:
            reply = self._ask(decode_request(line))
        except WireError as error:
            reply = Refused(f"{error} (is the cluster of another version than this command?)")
        connection.sendall(encode(reply) + b"\n")


def ask(path: Path, request: AnyRequest) -> AnyReply:
    """Send a request; return the cluster's reply.

    Raises :class:`ConfigError` if no cluster answers, :class:`WireError` for a reply that can't be decoded.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            _check_length(path)
            connection.connect(str(path))
            connection.sendall(encode(request) + b"\n")
            line = _read_line(connection)
        except TimeoutError as error:
            raise ConfigError(_silence(connection, path)) from error
        except OSError as error:
            raise ConfigError(f"the cluster doesn't answer at {path}: {error.strerror or error}") from error
    if not line:
        raise ConfigError(f"the cluster ended while it was asked at {path}")
    return decode_reply(line)


def _silence(connection: socket.socket, path: Path) -> str:
    """Return what to say of a launcher that listens at ``path`` and doesn't answer."""
    pid = _credentials(connection)[0] if hasattr(socket, "SO_PEERCRED") else 0
    name, remedy = (f", process {pid},", f"`kill -CONT {pid}` lets a stopped one go on, and ") if pid > 0 else ("", "")
    return (
        f"no answer came within {_ANSWER_SECONDS:g} s at {path}: the cluster's launcher{name} is stopped or hangs. "
        f"Router and workers may serve on, but none of them is started again; {remedy}splitserve logs may show why"
    )


def _read_line(connection: socket.socket) -> bytes:
    """Read up to a line feed; returns b"" if the connection ends before that or the line is too long."""
    data = bytearray()
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(data) + len(part) > MAX_LINE_BYTES:
            return b""
        data += part
    return bytes(data)


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the peer is this process's user or the superuser. The socket's mode keeps other users out
    already."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    return _credentials(connection)[1] in (0, os.getuid())


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group of the peer; process 0 is one that this one can't see."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(0, f"the path is longer than the {_MAX_PATH_BYTES} bytes that a socket's may have; set "
                         "SPLITSERVE_STATE_DIR to a shorter folder")  # fmt: skip
