"""KV connector over NIXL's UCX backend: decode pulls with READ; no progress thread, no polling when idle.

NIXL has no locks by default, and a copy between processes of one host happens inside the post itself, with the GIL
released. So each agent is owned by one thread. One thread serves: peers read through its agent. A few threads read,
since the posts of one fill neither the memory bus nor a GPU's link. Only the first of them copies through mappings of
peers' memory, because one is enough for that. A reading thread has a separate agent for each peer: only destroying an
agent reliably stops a posted read, and that must not stop the reads from other peers. The engine loop posts nothing to
NIXL itself: it submits commands and takes events. Of a read through a mapping it queues the copies of the first blocks,
so that the link is busy while the reading thread wakes up, or does all of it
(:mod:`splitserve.kvconnector.mapped.awaited`).

Without NIXL's own progress thread a transfer completes only while *both* sides poll. So a thread polls while its reads
are in flight, or while peers may be reading from this worker (:meth:`NixlConnector.serve`), and sleeps otherwise.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import msgspec

from splitserve.kvconnector.blocks.digest import DigestBlocks, no_digests
from splitserve.kvconnector.cuda.memory import check_ipc_capable
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.shape import Run, runs
from splitserve.kvconnector.mapped.awaited import MOST_AWAKE_SECONDS, AwaitedReads, Generations
from splitserve.kvconnector.mapped.reads import MappedRead, MappedReader
from splitserve.kvconnector.nixl.peer_access import LocalSide
from splitserve.kvconnector.nixl.read_thread import Connected, ReadThread
from splitserve.kvconnector.nixl.server import NixlServer
from splitserve.kvconnector.transfer.connector import PeerConnected, ServedMemory
from splitserve.kvconnector.transfer.joining import ConnectionJoin, ReadJoin, one_after_the_other
from splitserve.kvconnector.transfer.read_choice import ReadShape, choose_path, path_seconds
from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadPath, ReadResult
from splitserve.protocol.memory_records import HostTierMemory, MemoryKind
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

logger = logging.getLogger(__name__)

Event = ReadResult | PeerConnected


class _Peer:
    """The connector's state of a peer: the attempt to connect, and the cost of reading from it."""

    def __init__(self, attempt: int, num_threads: int) -> None:
        self.attempt = attempt
        self.mapped: MappedReader | None = None
        self.generations: Generations | None = None  # read in place
        self.join = ConnectionJoin(num_threads)
        self.shape: ReadShape | None = None
        self.cost: ReadCost | None = None
        self._chosen: dict[tuple[int, int], ReadPath] = {}  # by blocks and, where they matter, runs of these
        self._latest: dict[int, ReadPath] = {}  # by blocks

    def learn(self, shape: ReadShape | None, cost: ReadCost | None) -> None:
        """Store what one thread has measured; None: nothing new."""
        self.shape, self.cost = shape or self.shape, cost or self.cost
        self._chosen.clear()
        self._latest.clear()

    @property
    def counts_runs(self) -> bool:
        """True if the path of a read depends on how many of its blocks are adjacent."""
        return self.shape is not None and not self.shape.is_whole and self.shape.is_mapped

    def was_mapped(self, num_blocks: int) -> bool:
        """Return whether the latest such read went through the mapping, by choice."""
        return self._latest.get(num_blocks, ReadPath.DIRECT).is_through_mapping

    def path(self, num_blocks: int, num_runs: int, wanted: ReadPath | None) -> ReadPath:
        """Return the path of a read of blocks; ``num_runs`` (:func:`path_seconds`) matters if :attr:`counts_runs`."""
        shape, cost = self.shape, self.cost
        if shape is None or cost is None:
            return ReadPath.DIRECT
        if wanted is not None and wanted in path_seconds(shape, cost, num_blocks):
            return wanted
        size = (num_blocks, num_runs if self.counts_runs else 0)
        if (path := self._chosen.get(size)) is None:
            path = self._chosen[size] = choose_path(shape, cost, *size)
        self._latest[num_blocks] = path
        return path


class NixlConnector:
    """See :class:`splitserve.kvconnector.transfer.connector.KVConnector`; the connector of one rank, for a
    tensor-parallel worker.

    ``wake`` is called, from other threads, after events; ``digest_blocks`` computes digests of landed blocks;
    ``settings``: None for the defaults of this kind of memory; ``host``: a host tier that peers may read, too. Raises
    :class:`ConfigError` for GPU memory that other processes can't map.
    """

    name = "nixl"
    awaits_beside_steps = True

    def __init__(
        self,
        me: Party,
        memory: KVMemory,
        wake: Callable[[], None],
        digest_blocks: DigestBlocks = no_digests,
        *,
        rank: int = 0,
        settings: ReadSettings | None = None,
        host: HostTierMemory | None = None,
    ) -> None:
        if memory.kind is MemoryKind.VRAM:
            check_ipc_capable(memory.bytes)
        settings = settings or ReadSettings.of(memory.kind)
        self._memory = memory
        self._settings = settings
        self._wake = wake
        self._lock = threading.Lock()
        self._events: deque[ReadResult | Connected] = deque()
        self._peers: dict[Party, _Peer] = {}
        self._num_attempts = 0
        self._split_reads: dict[int, ReadJoin] = {}
        self._awaited = AwaitedReads(self._leave)
        self._checks_digests = digest_blocks is not no_digests
        name = f"rank-{rank}/{me}"  # UCX's log truncates agents' names: the distinguishing part comes first
        posting = replace(settings, maps=False, path=None)  # for all threads but the first
        self._server = NixlServer(name, memory, settings, host)
        self._threads = [
            ReadThread(
                f"read-{index}/{name}",
                LocalSide(memory, rank, posting if index else settings, digest_blocks),
                partial(self._join_read, index),
                self._join_connection,
                measures=not index,
            )
            for index in range(settings.num_threads)
        ]
        for thread in (self._server, *self._threads):
            thread.start()

    def served(self) -> ServedMemory:
        return ServedMemory(self.name, self._memory.generations_addresses, [self._server.served])

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        self._awaited.leave(peer)
        self._num_attempts += 1
        with self._lock:
            self._peers[peer] = _Peer(self._num_attempts, len(self._threads))
        for thread in self._threads:
            thread.submit(partial(thread.connect, self._num_attempts, peer, welcome))

    def disconnect(self, peer: Party) -> None:
        self._awaited.leave(peer)
        with self._lock:
            self._peers.pop(peer, None)
        for thread in self._threads:
            thread.submit(partial(thread.disconnect, peer))

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        started = time.monotonic()
        peer, local, remote = self._peers.get(command.peer), command.local_blocks, command.remote_blocks
        mapped = None if peer is None else peer.mapped
        generations = None if peer is None or not awaited or self._checks_digests else peer.generations
        first, num_queued, has_begun = None, 0, False
        if mapped is not None and generations is not None and peer is not None and peer.was_mapped(len(local)):
            num_queued, has_begun = mapped.begin(local, remote), True
        path, found = self._path(peer, len(local), runs(local[num_queued:], remote[num_queued:]))
        if has_begun and (num_queued == len(local) or not path.is_through_mapping):
            # By another path it could end before the copies that have begun: even if CUDA refused, some may have.
            path = ReadPath.MAPPED
        if path.is_through_mapping and mapped is not None and mapped.has_blocks(remote):
            whole = generations is not None and mapped.expected_seconds(len(local), path) <= MOST_AWAKE_SECONDS
            first = mapped.start(found, len(local), path, started, whole=whole, num_queued=num_queued)
        # A mapping's copies fill the link, and threads that queue copies at once delay each other
        parts = [command] if path.is_through_mapping else self._parts(command)
        with self._lock:
            self._split_reads[command.read_id] = ReadJoin(len(parts))
        if first is not None and generations is not None and self._awaited.add(command, first, generations):
            return
        for thread, part in zip(self._threads, parts, strict=False):
            thread.submit(partial(thread.read, part, path, first))

    def _path(self, peer: _Peer | None, num_blocks: int, found: Iterable[Run]) -> tuple[ReadPath, Iterable[Run]]:
        """Return the data's path of a read of blocks, and the runs of these."""
        if peer is None:
            return ReadPath.DIRECT, found
        with self._lock:
            num_runs = 0
            if peer.counts_runs:
                found = list(found)
                num_runs = len(found)
            return peer.path(num_blocks, num_runs, self._settings.path), found

    def is_landing(self) -> bool:
        if self._land():
            self._wake()
        return bool(self._awaited)

    def leave(self) -> None:
        self._awaited.leave()

    def serve(self, readers: Readers) -> None:
        self._server.submit(lambda: setattr(self._server, "readers", readers))

    def events(self) -> list[Event]:
        for thread in (self._server, *self._threads):
            thread.check()
        self._land()
        events: list[Event] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, ReadResult):
                events.append(event)
            elif self._peer_of(event) is not None:
                events.append(event.event)
        return events

    def close(self) -> None:
        for thread in (*self._threads, self._server):
            thread.close()

    def _parts(self, command: ReadCommand) -> list[ReadCommand]:
        """Split a large read into even parts, one per thread; keep a small one whole."""
        count = len(command.local_blocks)
        num_bytes = count * self._memory.groups[command.group].block_bytes
        if count < len(self._threads) or num_bytes <= self._settings.split_bytes:
            return [command]
        bounds = [count * index // len(self._threads) for index in range(len(self._threads) + 1)]
        return [
            msgspec.structs.replace(
                command, local_blocks=command.local_blocks[low:high], remote_blocks=command.remote_blocks[low:high]
            )
            for low, high in itertools.pairwise(bounds)
        ]

    def _peer_of(self, connected: Connected) -> _Peer | None:
        """Return the peer; None if the outcome is that of an earlier attempt to connect."""
        peer = self._peers.get(connected.event.peer)
        return peer if peer is not None and peer.attempt == connected.attempt else None

    def _land(self) -> bool:
        """Make events of awaited reads that have ended; return whether there are any."""
        found = [self._joined(0, result) for result in self._awaited.landed()]
        events = [event for event in found if event is not None]
        self._events.extend(events)
        return bool(events)

    def _leave(self, command: ReadCommand, first: MappedRead) -> None:
        """Let the thread that owns the peer's reader wait for a read whose copies are queued."""
        thread = self._threads[0]
        thread.submit(partial(thread.read, command, first.path, first))

    # ---- on the read threads ----

    def _join_connection(self, connected: Connected) -> None:
        with self._lock:
            peer = self._peer_of(connected)
            if peer is None:
                return
            peer.learn(connected.shape, connected.cost)
            peer.mapped = connected.mapped or peer.mapped
            peer.generations = connected.generations or peer.generations
            event = peer.join.add(connected.event)
        if event is not None:
            _tell(event)
            self._emit(Connected(connected.attempt, event))

    def _join_read(self, part: int, result: ReadResult) -> None:
        event = self._joined(part, result)
        if event is not None:
            self._emit(event)

    def _joined(self, part: int, result: ReadResult) -> ReadResult | None:
        """Add a part's result; return the whole read's, if it was the last one. On any thread."""
        with self._lock:
            results = self._split_reads[result.read_id].add(part, result)
            if results is None:
                return None
            del self._split_reads[result.read_id]
        return one_after_the_other(results)

    def _emit(self, event: ReadResult | Connected) -> None:
        self._events.append(event)
        self._wake()


def _tell(event: PeerConnected) -> None:
    """Log how fast reads from a peer are, and why they are slow."""
    if event.link is None:
        return
    speed = event.link.bytes_per_second / 1e9
    if event.link.problem:
        logger.error("reads from %s: %s", event.peer, event.link.problem)
    else:
        logger.info("reads from %s use %s, %.1f GB/s per thread", event.peer, event.link.transport, speed)
