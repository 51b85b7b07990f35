"""A reading thread of a NIXL connector: one agent per peer, probes of links, reads."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from splitserve.handover import ReadCommand, ReadPath, ReadResult
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.cuda_memory import make_context_current
from splitserve.kvconnector.nixl_link import LinkProbe
from splitserve.kvconnector.nixl_reader import PeerReader
from splitserve.kvconnector.owner_thread import OwnerThread
from splitserve.kvconnector.peer_access import LocalSide
from splitserve.kvconnector.read_choice import ReadShape
from splitserve.kvconnector.read_cost import ReadCost
from splitserve.kvconnector.ucx_log import UCX_LOG
from splitserve.messages import PeerWelcome
from splitserve.request import Party

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """Outcome of an attempt to connect, of one thread; ``shape`` and ``cost`` from the thread that measures."""

    attempt: int
    event: PeerConnected
    shape: ReadShape | None = None
    cost: ReadCost | None = None


class ReadThread(OwnerThread):
    """Owner of one reading agent per peer. With ``measures``, links are measured here."""

    def __init__(
        self,
        name: str,
        local: LocalSide,
        on_result: Callable[[ReadResult], None],
        on_connected: Callable[[Connected], None],
        *,
        measures: bool,
    ) -> None:
        super().__init__(name, local.settings.poll_seconds)
        self._name = name
        self._local = local
        self._on_result = on_result
        self._on_connected = on_connected
        self._measures = measures
        self._readers: dict[Party, PeerReader] = {}
        self._probes: dict[Party, tuple[int, LinkProbe]] = {}
        self._num_readers_made = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._probes) or any(reader.is_busy for reader in self._readers.values())

    @property
    def poll_seconds(self) -> float:
        """Time until something can be over: each look takes the interpreter from the thread that launches steps."""
        if self._probes:
            return super().poll_seconds
        due_at = min((reader.due_at for reader in self._readers.values() if reader.is_busy), default=0.0)
        return max(super().poll_seconds, due_at - time.monotonic())

    def begin(self) -> None:
        make_context_current(self._local.memory.device)

    def connect(self, attempt: int, peer: Party, welcome: PeerWelcome) -> None:
        self.disconnect(peer)
        self._num_readers_made += 1
        try:
            with self._not_the_peers_time():
                reader = PeerReader(f"{self._num_readers_made}/{self._name}", self._local, welcome)
        except Exception as problem:
            self._refuse(attempt, peer, problem)
        else:
            self._readers[peer] = reader
            self._probes[peer] = attempt, LinkProbe(reader.access, self._local.settings, measures=self._measures)

    def disconnect(self, peer: Party) -> None:
        probe, reader = self._probes.pop(peer, None), self._readers.pop(peer, None)
        if reader is not None:
            self._emit_all(reader.destroy())
        del probe  # not before: what was under way landed in memory of its

    def read(self, command: ReadCommand, path: ReadPath) -> None:
        reader = self._readers.get(command.peer)
        if reader is None:
            self._on_result(ReadResult(command.read_id, f"{command.peer} isn't connected"))
        else:
            reader.read(command, path)

    def poll(self) -> None:
        for peer, (attempt, probe) in list(self._probes.items()):
            with self._not_the_peers_time():
                self._poll_probe(attempt, peer, probe)
        for peer, reader in list(self._readers.items()):
            results = reader.poll()
            if any(result.error is not None for result in results):
                # What failed may have been posted in part: only the agent's end surely stops it, and the connection
                # is broken anyway. The core makes a new one.
                self._readers.pop(peer)
                results += reader.destroy()
                UCX_LOG.forward_complaints()
            self._emit_all(results)

    def finish(self) -> None:
        for peer in list(self._readers):
            self.disconnect(peer)

    def _poll_probe(self, attempt: int, peer: Party, probe: LinkProbe) -> None:
        try:
            if not probe.poll():
                return
        except Exception as problem:
            self.disconnect(peer)
            self._refuse(attempt, peer, problem)
            return
        del self._probes[peer]
        access = self._readers[peer].access
        if access.mapped is not None and probe.cost is not None:
            access.mapped.expect(probe.cost)
        shape = access.shape if self._measures else None  # the others have no mapping
        self._on_connected(Connected(attempt, PeerConnected(peer, None, probe.link), shape, probe.cost))

    @contextmanager
    def _not_the_peers_time(self) -> Iterator[None]:
        """Add what this thread computes, or has compiled, to the deadline of each probe."""
        started = time.monotonic()
        try:
            yield
        finally:
            for _, probe in self._probes.values():
                probe.deadline += time.monotonic() - started

    def _refuse(self, attempt: int, peer: Party, problem: Exception) -> None:
        UCX_LOG.forward_complaints()
        logger.warning("can't connect to %s: %s: %s", peer, type(problem).__name__, problem)
        self._on_connected(Connected(attempt, PeerConnected(peer, f"{type(problem).__name__}: {problem}")))

    def _emit_all(self, results: list[ReadResult]) -> None:
        for result in results:
            self._on_result(result)
