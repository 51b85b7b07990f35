"""Addresses of the router, and its restarts. Time is an argument."""

import http.client
import random
from urllib.parse import urlsplit

from splitserve.orchestration.cluster.restarts import RestartPolicy
from splitserve.orchestration.spec.expansion import RouterPorts


class RouterKeeper:
    """Keeper of the router. ``membership`` and ``url``: its addresses, or its last ones; "" before the first start.
    ``due_at``: time of its next start."""

    def __init__(self, restart: bool) -> None:
        self.membership = ""
        self.url = ""
        self.due_at = float("inf")
        self._restart = restart
        self._policy = RestartPolicy()
        self._listening_since: float | None = None
        self._chosen = random.Random()

    def recall(self, membership: str, url: str) -> None:
        """Set the addresses at which it listened under another launcher."""
        self.membership, self.url = membership, url

    @property
    def is_listening(self) -> bool:
        return self._listening_since is not None

    @property
    def is_due_some_time(self) -> bool:
        return self.due_at != float("inf")

    @property
    def ports(self) -> RouterPorts:
        """Return the ports of the router's predecessor, so that workers and clients find it."""
        return RouterPorts(urlsplit(self.url).port or 0, urlsplit(self.membership).port or 0)

    def on_membership(self, endpoint: str) -> bool:
        """Set the membership endpoint; returns whether workers know another one."""
        before, self.membership = self.membership, endpoint
        return before not in ("", endpoint)

    def on_listening(self, url: str, now: float) -> None:
        self.url, self._listening_since = url, now

    def on_exit(self, now: float) -> None:
        """Schedule the restart of a router that has ended or couldn't be started."""
        seconds = None if self._listening_since is None else now - self._listening_since
        self._listening_since = None
        delay_seconds = self._policy.on_death(seconds, self._chosen) if self._restart else None
        self.due_at = float("inf") if delay_seconds is None else now + delay_seconds


def probe_ready(url: str) -> tuple[bool, str]:
    """Return whether GET ``url``/ready gives 200, and the answer. Ignores any proxy of the environment."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=5.0)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return (
            response.status == http.HTTPStatus.OK,
            f"{response.status} {response.read(500).decode(errors='replace')}",
        )
    except (OSError, http.client.HTTPException) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
