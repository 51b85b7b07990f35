"""Addresses at which other machines reach this machine's processes."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import psutil

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.cluster_spec import NetworkSpec

LOOPBACK = "127.0.0.1"


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
