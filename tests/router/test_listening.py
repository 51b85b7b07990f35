"""The router's address: a port is one router's."""

import socket

import pytest

from splitserve.common.errors import ConfigError
from splitserve.router.server import listening_socket


def test_a_used_port_is_refused_before_the_first_router_serves():
    """Both set SO_REUSEADDR, with which Linux lets several sockets bind a port as long as none of them listens."""
    with listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            message = f"{host} port {port}: Address already in use; choose another --port"
            with pytest.raises(ConfigError, match=message), listening_socket(host, port):
                pass
    with listening_socket("127.0.0.1", port):
        pass  # free again


def test_a_port_whose_connections_linger_can_be_used_again():
    with listening_socket("127.0.0.1", 0) as first:
        address = first.getsockname()
        client = socket.create_connection(address)
        accepted, _ = first.accept()
        accepted.close()  # the server closes first: its side is in TIME_WAIT
        client.close()
    with listening_socket(*address):
        pass
