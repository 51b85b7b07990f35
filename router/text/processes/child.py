"""The child's side of a child process of the router: its bounds, and the messages on its standard input.

Standard input is a socket. Each message in either direction is preceded by four bytes with its length. The process ends
when the router closes the socket, or ends itself.
"""

import resource
import signal
import socket
import struct

LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18


def framed(content: bytes) -> bytes:
    """Return a message as it is sent."""
    return LENGTH.pack(len(content)) + content


def connect(max_memory_bytes: int) -> socket.socket:
    """Bound this process to an address space of ``max_memory_bytes``, and return its connection to the router."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the router, which ends its streams
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return socket.socket(fileno=0)


def receive(connection: socket.socket) -> bytes:
    """Return the content of the next message; b"" at the end."""
    data = bytearray()
    needed = LENGTH.size
    while len(data) < needed:
        piece = connection.recv(min(_RECEIVE_BYTES, needed - len(data)))
        if not piece:
            return b""
        data += piece
        if needed == LENGTH.size and len(data) >= needed:
            needed += LENGTH.unpack_from(data)[0]
    return bytes(data[LENGTH.size :])
