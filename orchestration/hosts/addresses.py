"""Addresses at which other processes reach this machine's, and free ports for them."""

import contextlib
import ipaddress
import random
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import NetworkSpec

LOOPBACK = "127.0.0.1"
_FIRST_PORT = 20000  # ports below are Ray's and other well-known ones
_NUM_CANDIDATES = 100


def own_address(network: NetworkSpec, default: str) -> str:
    """Return the address that this machine's processes bind under ``network``; ``default`` if ``network`` names none.

    Raises :class:`ConfigError` for an interface that this machine doesn't have, or that has no usable address.
    """
    if network.interface:
        return interface_address(network.interface, network.ip_version, psutil.net_if_addrs())
    return network.host or default


def interface_address(interface: str, ip_version: int, table: Mapping[str, Sequence[Any]]) -> str:
    """Return the first address of the interface that other machines can reach; link-local ones need a zone and are left
    out.

    ``table``: result of :func:`psutil.net_if_addrs`.
    """
    if interface not in table:
        raise ConfigError(f"there is no network interface {interface!r} here; there are {', '.join(sorted(table))}")
    family = socket.AF_INET if ip_version == 4 else socket.AF_INET6
    for entry in table[interface]:
        if entry.family == family and not ipaddress.ip_address(entry.address.split("%")[0]).is_link_local:
            return str(entry.address)
    others = ", ".join(entry.address for entry in table[interface] if entry.family in (socket.AF_INET, socket.AF_INET6))
    raise ConfigError(
        f"network interface {interface!r} has no usable IPv{ip_version} address (it has {others or 'none at all'}); "
        f"choose another interface or the other ip_version"
    )


def reachable_url(url: str, own_address: str) -> str:
    """Return ``url`` for other machines: a wildcard address is replaced by ``own_address``."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    host = f"[{own_address}]" if ":" in own_address else own_address
    return parts._replace(netloc=f"{host}:{parts.port}").geturl()


def zmq_endpoint(address: str, port: int) -> str:
    """Return the ZMQ endpoint of a TCP port, written as ZMQ itself writes it."""
    with contextlib.suppress(OSError):  # it is no address: binding it will fail
        [(*_, found), *_] = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        address, _ = socket.getnameinfo(found, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def hold_port(address: str = LOOPBACK) -> socket.socket:
    """Bind a port of ``address`` that no other socket has. Until the result is closed, no connection takes it, no other
    call of this function in any process, and no process that binds it without SO_REUSEADDR; ZMQ binds it, again and
    again. If the kernel reports its ephemeral ports, the port is none of them. Raises :class:`ConfigError`."""
    low = _first_ephemeral_port()
    candidates = range(_FIRST_PORT, low) if low > _FIRST_PORT + _NUM_CANDIDATES else ()
    for candidate in (*random.sample(candidates, min(len(candidates), _NUM_CANDIDATES)), 0):
        held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            held.bind((address, candidate))
            # Not before: it would get a port that is held elsewhere, too.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
        except OSError:
            held.close()
    raise ConfigError(f"no port of {address} can be bound: is it an address of this machine?")


def free_port(address: str = LOOPBACK) -> int:
    """Return a port as :func:`hold_port` binds it, but don't hold it. Raises :class:`ConfigError`."""
    with hold_port(address) as held:
        return port_of(held)


def can_listen(address: str, port: int) -> bool:
    """Return whether a process could listen on the port now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen()
        except OSError:
            return False
    return True


def port_of(bound: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    port: int = bound.getsockname()[1]
    return port


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
