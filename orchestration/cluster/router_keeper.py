"""The router processes of a cluster: their addresses, starts and restarts. Time is an argument."""

import http.client
import logging
import random
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import Event, Host
from splitserve.orchestration.cluster.restarts import RestartPolicy
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.expansion import ANY_PORTS, RouterPorts, router_names

_log = logging.getLogger(__name__)


class RouterKeeper:
    """Keeper of the router. ``membership`` and ``url``: its addresses, or its last ones; "" before the first start.
    ``listening_since``: None unless it listens; ``due_at``: time of its next start; ``last_words``: reason of its
    predecessor's end."""

    def __init__(self, restart: bool) -> None:
        self.membership = ""
        self.url = ""
        self.due_at = float("inf")
        self._restart = restart
        self._policy = RestartPolicy()
        self.num_restarts = 0
        self.last_words = ""
        self.listening_since: float | None = None
        self._chosen = random.Random()

    def recall(self, membership: str, url: str) -> None:
        """Set the addresses at which it listened under another launcher."""
        self.membership, self.url = membership, url

    @property
    def is_listening(self) -> bool:
        return self.listening_since is not None

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
        self.url, self.listening_since = url, now

    def on_exit(self, words: str, now: float) -> None:
        """Schedule the restart of a router that has ended or couldn't be started."""
        self.last_words = words
        seconds = None if self.listening_since is None else now - self.listening_since
        self.listening_since = None
        delay_seconds = self._policy.on_death(seconds, self._chosen) if self._restart else None
        self.due_at = float("inf") if delay_seconds is None else now + delay_seconds


class Routers:
    """Keeper of the router processes, which share one port if there are several. ``children`` and ``host`` are those of
    the cluster."""

    def __init__(
        self, spec: ClusterSpec, children: Children, host: Host, emit: Callable[[Event], None], *, restart: bool
    ) -> None:
        self._spec = spec
        self._children = children
        self._host = host
        self._emit = emit
        self.keepers = {name: RouterKeeper(restart) for name in router_names(spec)}

    def __contains__(self, name: str) -> bool:
        return name in self.keepers

    @property
    def membership(self) -> str:
        """Endpoints of the memberships, separated by commas; "" until all are known."""
        endpoints = [keeper.membership for keeper in self.keepers.values()]
        return ",".join(endpoints) if all(endpoints) else ""

    @property
    def url(self) -> str:
        """URL of the endpoint; "" until all routers have listened."""
        urls = [keeper.url for keeper in self.keepers.values()]
        return urls[0] if all(urls) else ""

    @property
    def due_at(self) -> float:
        """Time of the next start."""
        return min(keeper.due_at for keeper in self.keepers.values())

    @property
    def are_listening(self) -> bool:
        return all(keeper.is_listening for keeper in self.keepers.values())

    @property
    def are_lost(self) -> bool:
        """True if no router runs, and none will be started."""
        running = self.keepers.keys() & self._children.by_name.keys()
        return not running and self.due_at == float("inf")

    def start(self) -> None:
        """Start all of them. Raises as :meth:`Host.start_router` does."""
        for name in self.keepers:
            self._children.add(self._host.start_router(name, self._spec, ANY_PORTS, self._emit))

    def recall(self, membership: str, url: str, now: float) -> None:
        """Set the addresses at which they listened under another launcher; those that don't run are due now."""
        for (name, keeper), endpoint in zip(self.keepers.items(), membership.split(","), strict=False):
            keeper.recall(endpoint, url)
            if name not in self._children.by_name:
                keeper.due_at = now

    def start_due(self, now: float) -> None:
        """Start again those that are due, on the same ports, so that workers and clients find them."""
        for name, keeper in self.keepers.items():
            if keeper.due_at <= now:
                keeper.due_at = float("inf")
                keeper.num_restarts += 1
                launch = partial(self._host.start_router, name, self._spec, keeper.ports, self._emit)
                error = self._children.try_start(launch)
                if error is not None:
                    _log.error("the %s can't be started: %s", name, error)
                    self.on_exit(name, str(error), now)

    def on_exit(self, name: str, words: str, now: float) -> None:
        """Schedule the restart of a router, unless its end is the cluster's."""
        keeper = self.keepers[name]
        keeper.on_exit(words, now)
        if keeper.is_due_some_time:
            _log.warning("the %s is started again in %.1f s", name, keeper.due_at - now)

    def on_membership(self, name: str, endpoint: str) -> bool:
        """Set a membership endpoint; returns whether workers know another one."""
        return self.keepers[name].on_membership(endpoint)

    def on_listening(self, name: str, url: str, now: float) -> None:
        self.keepers[name].on_listening(url, now)


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
