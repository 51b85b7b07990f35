"""Addresses by which the processes of a cluster reach each other."""

import random
import socket
from typing import NamedTuple

import pytest
import zmq

from splitserve.common.errors import ConfigError
from splitserve.orchestration.hosts import addresses
from splitserve.orchestration.hosts.addresses import (
    free_port,
    hold_port,
    interface_address,
    own_address,
    port_of,
    reachable_url,
    zmq_endpoint,
)
from splitserve.orchestration.spec.cluster_spec import NetworkSpec
from waiting import PATIENCE_SECONDS


class Entry(NamedTuple):
    family: int
    address: str


INTERFACES = {
    "lo": [Entry(socket.AF_INET, "127.0.0.1"), Entry(socket.AF_INET6, "::1")],
    "eth0": [
        Entry(socket.AF_INET6, "fe80::1%eth0"),
        Entry(socket.AF_INET, "10.1.2.3"),
        Entry(socket.AF_INET6, "2001:db8::7"),
    ],
    "ib0": [Entry(-1, "00:11"), Entry(socket.AF_INET6, "fe80::2%ib0")],
}


@pytest.mark.parametrize(
    ("interface", "ip_version", "address"),
    [("lo", 4, "127.0.0.1"), ("lo", 6, "::1"), ("eth0", 4, "10.1.2.3"), ("eth0", 6, "2001:db8::7")],
)
def test_addresses_of_interfaces(interface: str, ip_version: int, address: str) -> None:
    assert interface_address(interface, ip_version, INTERFACES) == address


def test_interfaces_without_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="no network interface 'eth7' here; there are eth0, ib0, lo"):
        interface_address("eth7", 4, INTERFACES)
    with pytest.raises(ConfigError, match=r"'ib0' has no usable IPv6 address \(it has fe80::2%ib0\)"):
        interface_address("ib0", 6, INTERFACES)


def test_the_address_of_this_machine() -> None:
    assert own_address(NetworkSpec(), "192.0.2.1") == "192.0.2.1"
    assert own_address(NetworkSpec(host="10.0.0.1"), "192.0.2.1") == "10.0.0.1"
    assert own_address(NetworkSpec(interface="lo"), "192.0.2.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("url", "reachable"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://10.1.2.3:8000"),
        ("http://[::]:8000", "http://10.1.2.3:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_that_others_can_use(url: str, reachable: str) -> None:
    assert reachable_url(url, "10.1.2.3") == reachable
    assert reachable_url("http://[::]:1", "2001:db8::7") == "http://[2001:db8::7]:1"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"])
def test_endpoints_are_written_as_zmq_writes_them(address: str) -> None:
    """A router that reports another text for its membership would seem to have moved."""
    port = free_port(address)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.setsockopt(zmq.IPV6, int(":" in address))
        bound.bind(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
        assert zmq_endpoint(address, port) == bound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_held_port_is_the_router_s_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_port(address) as held:
        port = port_of(held)
        for _ in range(2):  # the second is like a router that comes after one that was killed
            with socket.socket(held.family) as other, pytest.raises(OSError, match="Address already in use"):
                other.bind((address, port))
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as peer:
                for each in (router, peer):
                    each.setsockopt(zmq.IPV6, 1)
                    each.setsockopt(zmq.LINGER, 0)
                router.bind(zmq_endpoint(address, port))
                peer.connect(zmq_endpoint(address, port))
                peer.send(b"hello")
                assert router.poll(PATIENCE_SECONDS * 1e3) and router.recv_multipart()[1] == b"hello"
        monkeypatch.setattr(addresses, "_first_ephemeral_port", lambda: 1 << 16)
        monkeypatch.setattr(random, "sample", lambda *_: [port])
        with hold_port(address) as next_one:
            assert port_of(next_one) != port


def test_no_port_of_a_strange_address_is_free() -> None:
    with pytest.raises(ConfigError, match=r"no port of 192\.0\.2\.1 can be bound: is it an address of this machine\?"):
        free_port("192.0.2.1")
