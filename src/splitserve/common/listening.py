"""Listening sockets."""

import errno
import socket

from splitserve.common.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; 0: on any free port. Raises :class:`ConfigError`.

    It listens from the beginning: until one of them does, two sockets with SO_REUSEADDR may be bound to one port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        is_wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = "give an address of this machine as --host" if is_wrong_host else "choose another --port"
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror or error}; {remedy}") from error
    return listener
