"""A reading thread of a NIXL connector: one agent per peer, probes of connections, reads."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from splitserve.kvconnector.cuda.memory import make_context_current
from splitserve.kvconnector.mapped.awaited import Generations
from splitserve.kvconnector.mapped.reads import MappedRead, MappedReader
from splitserve.kvconnector.nixl.link import LinkProbe
from splitserve.kvconnector.nixl.peer_access import LocalSide
from splitserve.kvconnector.nixl.reader import PeerReader
from splitserve.kvconnector.nixl.ucx_log import UCX_LOG
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.owner_thread import OwnerThread
from splitserve.kvconnector.transfer.read_choice import ReadShape
from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """Outcome of one thread's attempt to connect; all but the event only from the measuring thread. ``generations``:
    None unless they are mapped."""

    attempt: int
    event: PeerConnected
    shape: ReadShape | None = None
    cost: ReadCost | None = None
    mapped: MappedReader | None = None
    generations: Generations | None = None


class ReadThread(OwnerThread):
    """Owner of one reading agent per peer. With ``measures``, it also measures the connections."""

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
        """Time until a read can be complete: each poll takes the GIL from the thread that launches steps."""
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
        del probe  # only now, because reads in flight may have landed in the probe's memory

    def read(self, command: ReadCommand, path: ReadPath, first: MappedRead | None = None) -> None:
        reader = self._readers.get(command.peer)
        if reader is None:
            self._on_result(ReadResult(command.read_id, f"{command.peer} isn't connected"))
        else:
            reader.read(command, path, first)

    def poll(self) -> None:
        for peer, (attempt, probe) in list(self._probes.items()):
            with self._not_the_peers_time():
                self._poll_probe(attempt, peer, probe)
        for peer, reader in list(self._readers.items()):
            results = reader.poll()
            if any(result.error is not None for result in results):
                # A failed read may have been posted in part: only the agent's end reliably stops it, and the connection
                # is broken anyway. The protocol core establishes a new one.
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
        generations = access.generations.in_place if access.generations.are_in_place else None
        event = PeerConnected(peer, None, probe.link)
        self._on_connected(Connected(attempt, event, shape, probe.cost, access.mapped, generations))

    @contextmanager
    def _not_the_peers_time(self) -> Iterator[None]:
        """Extend the deadline of each probe by the time that this thread spends computing or compiling."""
        started = time.monotonic()
        try:
            yield
        finally:
            for _, probe in self._probes.values():
                probe.deadline += time.monotonic() - started

    def _refuse(self, attempt: int, peer: Party, problem: Exception) -> None:
        UCX_LOG.forward_complaints()
        logger.warning("cannot connect to %s: %s: %s", peer, type(problem).__name__, problem)
        self._on_connected(Connected(attempt, PeerConnected(peer, f"{type(problem).__name__}: {problem}")))

    def _emit_all(self, results: list[ReadResult]) -> None:
        for result in results:
            self._on_result(result)
