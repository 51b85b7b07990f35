"""Which LMCache servers a cluster has: one on each machine where workers use it, started again when it ends. Pure."""

from collections.abc import Collection

from splitserve.orchestration.cluster.host import LMCACHE
from splitserve.orchestration.cluster.restarts import Revival


def lmcache_on(node: str) -> str:
    """The name of the server on one of several nodes."""
    return f"{LMCACHE}@{node}"


def is_lmcache(name: str) -> bool:
    """Whether a process keeps an LMCache server; no worker has such a name."""
    return name == LMCACHE or name.startswith(lmcache_on(""))


class LMCacheKeeper:
    """Servers go by the names of the processes that keep them. A server stays until all its workers are gone for good,
    or have moved elsewhere: a worker that dies is to find what it had stored."""

    def __init__(self) -> None:
        self._servers: dict[str, Revival] = {}
        self._users: dict[str, str] = {}  # worker -> server
        self._left: set[str] = set()  # servers that have lost a worker

    def use(self, worker: str, server: str, now: float) -> None:
        """The worker runs where this server is, or shall be."""
        self.leave(worker)
        self._users[worker] = server
        self._servers.setdefault(server, Revival(due_at=now))

    def adopt(self, running: Collection[str]) -> set[str]:
        """Go on with those of the processes that keep servers; which they are."""
        self._servers = {name: Revival() for name in running if is_lmcache(name)}
        return set(self._servers)

    def leave(self, worker: str) -> None:
        """The worker won't come back."""
        if worker in self._users:
            self._left.add(self._users.pop(worker))

    def take_unused(self, running: Collection[str]) -> list[str]:
        """Servers to end now, since nobody uses them any more."""
        unused = self._left - set(self._users.values())
        self._left.clear()
        for server in unused:
            self._servers.pop(server, None)
        return [server for server in sorted(unused) if server in running]

    def take_due(self, now: float, running: Collection[str]) -> list[str]:
        """Servers to start now. One that is about to end is started again when it has."""
        due = [server for server, revival in self._servers.items() if revival.due_at <= now]
        for server in due:
            self._servers[server].due_at = float("inf")
        return [server for server in due if server not in running]

    def on_ready(self, server: str, now: float) -> None:
        if server in self._servers:
            self._servers[server].on_ready(now)

    def on_exit(self, server: str, now: float) -> None:
        """It has ended, or couldn't be started."""
        if server in self._servers:
            self._servers[server].on_exit(now)

    def next_due(self) -> float:
        return min((revival.due_at for revival in self._servers.values()), default=float("inf"))
