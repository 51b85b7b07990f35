"""KV connector over NIXL's UCX backend: decode pulls with READ; no progress thread, nothing spins when idle.

NIXL doesn't lock by default, and a copy between processes of one host happens inside the post itself, with the GIL
released. So every agent has one thread that owns it: one thread serves (peers read through its agent), and a few read,
since what one of them posts fills neither the memory bus nor a GPU's link. Only the first one copies through mappings
of peers' memory, which takes no more. A reading thread has an agent of its own per
peer: destroying an agent is the only thing that surely stops a posted read, and it must not stop the reads from other
peers. The engine loop posts nothing itself: it hands commands over, and takes events.

Without NIXL's own progress thread a transfer completes only while *both* sides poll. So a thread polls while its reads
are in flight, or while peers may be reading from here (:meth:`NixlConnector.serve`), and sleeps otherwise.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from splitserve.handover import ReadCommand, ReadPath, ReadResult
from splitserve.kvconnector.connector import PeerConnected, ServedMemory
from splitserve.kvconnector.cuda_memory import check_ipc_capable, export, make_context_current
from splitserve.kvconnector.digest import DigestBlocks, no_digests
from splitserve.kvconnector.gather import GatherSource
from splitserve.kvconnector.joining import ConnectionJoin, ReadJoin, one_after_the_other
from splitserve.kvconnector.layout import runs
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_agent import Agent
from splitserve.kvconnector.nixl_link import LinkProbe
from splitserve.kvconnector.nixl_reader import LocalSide, PeerReader
from splitserve.kvconnector.owner_thread import OwnerThread
from splitserve.kvconnector.read_choice import ReadShape, choose_path, path_seconds
from splitserve.kvconnector.read_cost import ReadCost
from splitserve.kvconnector.read_settings import ReadSettings
from splitserve.kvconnector.ucx_log import UCX_LOG
from splitserve.memory_records import HostTierMemory, MemoryKind, RankMemory
from splitserve.messages import PeerWelcome
from splitserve.request import Party

logger = logging.getLogger(__name__)

Event = ReadResult | PeerConnected


class _Server(OwnerThread):
    """Owns the agent that peers read through, and what it puts together for them; polls while ``active``."""

    def __init__(self, name: str, memory: KVMemory, settings: ReadSettings, host: HostTierMemory | None = None) -> None:
        super().__init__("nixl-serve", settings.serve_poll_seconds)
        self.active = False
        self._gather_poll_seconds = settings.poll_seconds
        self._device = memory.device
        self._region = memory.region()
        self._agent = Agent(f"serve/{name}")
        num_bytes = self._region.num_bytes
        self._agent.register(self._region.kind, self._region.blocks_address, num_bytes, self._region.device_id)
        self._agent.register(MemoryKind.DRAM, memory.generations_address, memory.num_blocks * 8)
        self._gather = GatherSource(memory, settings.gather_slots, settings.gather_slot_bytes)
        gather = self._gather.region()
        num_bytes = gather.slots.num_bytes
        self._agent.register(gather.slots.kind, gather.slots.blocks_address, num_bytes, gather.slots.device_id)
        self._agent.register(MemoryKind.DRAM, gather.tickets_address, gather.slots.num_blocks * 8)
        if host is not None:
            num_bytes = host.slots.num_bytes
            self._agent.register(MemoryKind.DRAM, host.slots.blocks_address, num_bytes)
            self._agent.register(MemoryKind.DRAM, host.generations_address, host.slots.num_blocks * 8)
        mappable = export(memory.blocks, self._gather.memory)
        self.served = RankMemory(self._agent.metadata(), self._region, gather, host, mappable)

    @property
    def is_busy(self) -> bool:
        return self.active

    @property
    def poll_seconds(self) -> float:
        return self._gather_poll_seconds if self._gather.is_wanted else super().poll_seconds

    def begin(self) -> None:
        make_context_current(self._device)
        self._gather.prepare()

    def poll(self) -> None:
        if self.active:
            for message in self._agent.progress():
                self._gather.hear(message)
            self._gather.poll()

    def finish(self) -> None:
        self._agent.destroy()
        self._gather.wait()


class _ReadThread(OwnerThread):
    """Owns one reading agent per peer. With ``measures``, links are measured here."""

    def __init__(
        self,
        name: str,
        local: LocalSide,
        on_result: Callable[[ReadResult], None],
        on_connected: Callable[["Connected"], None],
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
        """Not before something can be over: each look takes the interpreter from the thread that launches steps."""
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
            self._probes[peer] = attempt, LinkProbe(reader, self._local.settings, measures=self._measures)

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
        reader = self._readers[peer]
        if reader.mapped is not None and probe.cost is not None:
            reader.mapped.expect(probe.cost)
        shape = reader.shape if self._measures else None  # the others have no mapping
        self._on_connected(Connected(attempt, PeerConnected(peer, None, probe.link), shape, probe.cost))

    @contextmanager
    def _not_the_peers_time(self) -> Iterator[None]:
        """What this thread computes, or has compiled, is on no probe's account."""
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


@dataclass(frozen=True, slots=True)
class Connected:
    """One thread's outcome of an attempt to connect; ``shape`` and ``cost`` from the thread that measures."""

    attempt: int
    event: PeerConnected
    shape: ReadShape | None = None
    cost: ReadCost | None = None


class _Peer:
    """A peer as the connector knows it: the attempt to connect, and what reading from it costs."""

    def __init__(self, attempt: int, num_threads: int) -> None:
        self.attempt = attempt
        self.join = ConnectionJoin(num_threads)
        self.shape: ReadShape | None = None
        self.cost: ReadCost | None = None
        self._chosen: dict[int, ReadPath] = {}

    def learn(self, shape: ReadShape | None, cost: ReadCost | None) -> None:
        """What one thread knows; None: nothing new."""
        self.shape, self.cost = shape or self.shape, cost or self.cost
        self._chosen.clear()

    def path(self, command: ReadCommand, wanted: ReadPath | None) -> ReadPath:
        shape, cost, num_blocks = self.shape, self.cost, len(command.local_blocks)
        if shape is None or cost is None:
            return ReadPath.DIRECT
        if wanted is not None and wanted in path_seconds(shape, cost, num_blocks):
            return wanted
        if not shape.is_whole and shape.is_mapped:  # what of the blocks is adjacent decides
            num_runs = sum(1 for _ in runs(command.local_blocks, command.remote_blocks))
            return choose_path(shape, cost, num_blocks, num_runs)
        if num_blocks not in self._chosen:
            self._chosen[num_blocks] = choose_path(shape, cost, num_blocks)
        return self._chosen[num_blocks]


class NixlConnector:
    """See :class:`splitserve.kvconnector.connector.KVConnector`; one rank's, of a tensor-parallel worker.

    ``wake`` is called, from other threads, after events; ``digest_blocks`` for what has landed; ``settings`` None: what
    suits the memory; ``host`` is a tier that peers may read from, too. Raises :class:`ConfigError` for GPU memory that
    no other process can map.
    """

    name = "nixl"

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
            check_ipc_capable(memory.blocks)
        settings = settings or ReadSettings.of(memory.kind)
        self._memory = memory
        self._settings = settings
        self._wake = wake
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._peers: dict[Party, _Peer] = {}
        self._num_attempts = 0
        self._split_reads: dict[int, ReadJoin] = {}
        name = f"rank-{rank}/{me}"  # agents' names are cut in UCX's log: what tells them apart comes first
        posting = replace(settings, maps=False, path=None)  # what a thread but the first one does
        self._server = _Server(name, memory, settings, host)
        self._threads = [
            _ReadThread(
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
        return ServedMemory(self.name, self._memory.generations_address, [self._server.served])

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        self._num_attempts += 1
        with self._lock:
            self._peers[peer] = _Peer(self._num_attempts, len(self._threads))
        for thread in self._threads:
            thread.submit(partial(thread.connect, self._num_attempts, peer, welcome))

    def disconnect(self, peer: Party) -> None:
        with self._lock:
            self._peers.pop(peer, None)
        for thread in self._threads:
            thread.submit(partial(thread.disconnect, peer))

    def read(self, command: ReadCommand) -> None:
        with self._lock:
            reads = self._reads(command, self._peers.get(command.peer))
            self._split_reads[command.read_id] = ReadJoin(len(reads))
        for thread, (part, path) in zip(self._threads, reads, strict=False):
            thread.submit(partial(thread.read, part, path))

    def serve(self, active: bool) -> None:
        self._server.submit(lambda: setattr(self._server, "active", active))

    def events(self) -> list[Event]:
        for thread in (self._server, *self._threads):
            thread.check()
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        for thread in (*self._threads, self._server):
            thread.close()

    def _reads(self, command: ReadCommand, peer: _Peer | None) -> list[tuple[ReadCommand, ReadPath]]:
        """What each thread reads, and by which path; through a mapping the first one alone, since its copies fill the
        link and threads that queue copies at once hold each other up."""
        path = ReadPath.DIRECT if peer is None else peer.path(command, self._settings.path)
        parts = [command] if path.is_through_mapping else self._parts(command)
        return [(part, path) for part in parts]

    def _parts(self, command: ReadCommand) -> list[ReadCommand]:
        """A large read in even parts, one per thread; a small one whole."""
        count = len(command.local_blocks)
        if count < len(self._threads) or count * self._memory.block_bytes <= self._settings.split_bytes:
            return [command]
        bounds = [count * index // len(self._threads) for index in range(len(self._threads) + 1)]
        return [
            ReadCommand(command.read_id, command.peer, command.local_blocks[low:high], command.remote_blocks[low:high])
            for low, high in itertools.pairwise(bounds)
        ]

    # ---- on the read threads ----

    def _join_connection(self, connected: Connected) -> None:
        with self._lock:
            peer = self._peers.get(connected.event.peer)
            if peer is None or peer.attempt != connected.attempt:
                return
            peer.learn(connected.shape, connected.cost)
            event = peer.join.add(connected.event)
        if event is not None:
            _tell(event)
            self._emit(event)

    def _join_read(self, part: int, result: ReadResult) -> None:
        with self._lock:
            results = self._split_reads[result.read_id].add(part, result)
            if results is None:
                return
            del self._split_reads[result.read_id]
        self._emit(one_after_the_other(results))

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._wake()


def _tell(event: PeerConnected) -> None:
    """Where somebody looks who wonders why hand-overs are slow."""
    if event.link is None:
        return
    speed = event.link.bytes_per_second / 1e9
    if event.link.problem:
        logger.error("reads from %s: %s", event.peer, event.link.problem)
    else:
        logger.info("reads from %s go by %s, %.1f GB/s per thread", event.peer, event.link.transport, speed)
