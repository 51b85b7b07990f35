"""Protection of the side channels: CURVE keys derived from one shared secret, and the rule for when one is needed.

Every process derives the same two key pairs from the secret: one for sockets that bind, one for sockets that connect.
A secret that was drawn rather than chosen is these keys: there is nothing to guess.
CURVE then encrypts each connection and proves to either side that its peer has the secret; an authenticator rejects
connecting keys other than the derived one. Without a secret, sockets bind to loopback only.
"""

import hashlib
import hmac
import ipaddress
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from splitserve.common.errors import ConfigError

if TYPE_CHECKING:  # the command line needs the rules alone, and fast
    import zmq

MIN_SECRET_CHARACTERS = 16
_DRAWN = "drawn-keys:"
_KEY_BYTES = 64  # of both secret keys
_SCRYPT_COST = 2**14  # slow on purpose: recorded handshakes can't be tried against many secrets


def drawn_secret() -> str:
    """Return a random shared secret. It isn't stretched, which would cost each process 50 ms of CPU time."""
    return _DRAWN + secrets.token_hex(_KEY_BYTES)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (a name or an address, IPv6 with or without brackets) is reachable from this machine
    only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, secret: str) -> None:
    """Raise :class:`ConfigError` for a side channel that other machines can reach and no secret protects.

    Wildcards are rejected: other processes connect to the same address that is bound.
    """
    if host in ("", "*") or _is_unspecified(host):
        raise ConfigError(f"side channels can't use {host!r}: give the address at which others reach this machine")
    check_length(secret)
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"side channels on {host} could be reached by others; give all processes the same shared secret "
            "(SPLITSERVE_SECRET or --secret-file), or bind to 127.0.0.1"
        )


def check_length(secret: str) -> None:
    """Raise :class:`ConfigError` for a shared secret that could be guessed; "" is none."""
    if secret and len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(f"the shared secret has {len(secret)} characters; use at least {MIN_SECRET_CHARACTERS}")


class SocketSecurity:
    """Protects the sockets of one ZMQ context. With an empty secret it does nothing."""

    def __init__(self, context: "zmq.Context[Any]", secret: str) -> None:
        self._enabled = bool(secret)
        if not self._enabled:
            return
        import zmq.auth.thread

        self._bound, self._connecting = _key_pairs(secret)
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)

    def protect_bound(self, socket: "zmq.Socket[bytes]") -> None:
        """Prepare a socket that binds. Call it before ``bind``."""
        if self._enabled:
            socket.curve_publickey, socket.curve_secretkey = self._bound
            socket.curve_server = True

    def protect_connecting(self, socket: "zmq.Socket[bytes]") -> None:
        """Prepare a socket that connects. Call it before ``connect``."""
        if self._enabled:
            socket.curve_publickey, socket.curve_secretkey = self._connecting
            socket.curve_serverkey = self._bound[0]

    def callback(self, domain: str, key: bytes) -> bool:
        """Return, for the authenticator, whether a connecting key (Z85) is the one derived from the secret."""
        del domain
        return hmac.compare_digest(key, self._connecting[0])

    def close(self) -> None:
        """Stop the authenticator. Call it before the context is terminated."""
        if self._enabled:
            self._authenticator.stop()


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


@lru_cache(maxsize=4)
def _key_pairs(secret: str) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Return (public key, secret key), Z85-encoded, of sockets that bind, and of sockets that connect.

    The secret keys are a stretched hash of the shared secret, unless it is :func:`drawn_secret`'s: X25519 takes any
    32 bytes.
    """
    import zmq
    from zmq.utils import z85

    keys = _drawn_keys(secret) or hashlib.scrypt(
        secret.encode(), salt=b"splitserve side channels", n=_SCRYPT_COST, r=8, p=1, maxmem=2**26, dklen=_KEY_BYTES
    )
    bound, connecting = z85.encode(keys[: _KEY_BYTES // 2]), z85.encode(keys[_KEY_BYTES // 2 :])
    return (zmq.curve_public(bound), bound), (zmq.curve_public(connecting), connecting)


def _drawn_keys(secret: str) -> bytes:
    """Return the keys that the secret is; b"" for any other secret."""
    try:
        keys = bytes.fromhex(secret.removeprefix(_DRAWN)) if secret.startswith(_DRAWN) else b""
    except ValueError:
        return b""
    return keys if len(keys) == _KEY_BYTES else b""
