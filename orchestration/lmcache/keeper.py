"""LMCache servers of a cluster: one on each machine with workers that use it, started again when it ends. Pure."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from splitserve.orchestration.cluster.host import LMCACHE
from splitserve.orchestration.cluster.restarts import Revival


def lmcache_on(node: str) -> str:
    """Return the name of the server on one of several nodes."""
    return f"{LMCACHE}@{node}"


def is_lmcache(name: str) -> bool:
    """Return whether a process keeps an LMCache server; no worker has such a name."""
    return name == LMCACHE or name.startswith(lmcache_on(""))


class ServerState(NamedTuple):
    """State of a server, for people."""

    name: str
    seconds_ready: float | None  # None unless it answers
    due_in_seconds: float | None  # until its next start; None unless it waits for one


class LMCacheKeeper:
    """Keeper of a cluster's LMCache servers, by the names of their processes. A server stays until all its workers are
    gone for good or run on other machines: a worker that is started again finds the KV that it had stored."""

    def __init__(self) -> None:
        self._servers: dict[str, Revival] = {}
        self._users: dict[str, str] = {}  # worker -> server
        self._left: set[str] = set()  # servers that have lost a worker
        self._down: set[str] = set()  # servers that their own processes start again

    def use(self, worker: str, server: str, now: float) -> None:
        """Note that a worker runs on the machine of this server, which may yet have to be started."""
        self.leave(worker)
        self._users[worker] = server
        self._servers.setdefault(server, Revival(due_at=now))

    def adopt(self, running: Collection[str]) -> set[str]:
        """Continue with those of the running processes that keep servers; returns their names."""
        self._servers = {name: Revival() for name in running if is_lmcache(name)}
        return set(self._servers)

    def leave(self, worker: str) -> None:
        """Note that a worker won't be started again."""
        if worker in self._users:
            self._left.add(self._users.pop(worker))

    def take_unused(self, running: Collection[str]) -> list[str]:
        """Return the servers to end now, since no worker uses them any more."""
        unused = self._left - set(self._users.values())
        self._left.clear()
        for server in unused:
            self._servers.pop(server, None)
        return [server for server in sorted(unused) if server in running]

    def take_due(self, now: float, running: Collection[str]) -> list[str]:
        """Return the servers to start now. A server that is about to end is started again after its end."""
        due = [server for server, revival in self._servers.items() if revival.due_at <= now]
        for server in due:
            self._servers[server].due_at = float("inf")
        return [server for server in due if server not in running]

    def on_ready(self, server: str, now: float) -> None:
        self._down.discard(server)
        if server in self._servers:
            self._servers[server].on_ready(now)

    def on_down(self, server: str) -> None:
        """Note that a server is started again by the process that keeps it."""
        self._down.add(server)

    def on_exit(self, server: str, now: float) -> None:
        """Schedule the restart of a server that has ended or couldn't be started."""
        self._down.discard(server)
        if server in self._servers:
            self._servers[server].on_exit(now)

    def states(self, now: float) -> Iterator[ServerState]:
        """Yield the state of each server."""
        for name, revival in sorted(self._servers.items()):
            since = None if name in self._down else revival.ready_since
            due = revival.due_at if revival.due_at < float("inf") else None
            yield ServerState(
                name, None if since is None else now - since, None if due is None else max(0.0, due - now)
            )

    def not_ready(self) -> list[str]:
        """Return the names of the servers that don't answer yet, or not any more."""
        return sorted(server for server, revival in self._servers.items() if not revival.is_ready)

    def next_due(self) -> float:
        return min((revival.due_at for revival in self._servers.values()), default=float("inf"))
