"""KV connector over NIXL's UCX backend: decode pulls with READ; no progress thread, nothing spins when idle.

NIXL doesn't lock by default, and a copy between processes of one host happens inside the post itself, with the GIL
released. So every agent has one thread that owns it: one thread serves (peers read through its agent), and a few read,
since one thread's copies don't fill the memory bus. A reading thread has an agent of its own per peer: destroying an
agent is the only thing that surely stops a posted read, and it must not stop the reads from other peers.

Without NIXL's own progress thread a transfer completes only while *both* sides poll. So a thread polls while its reads
are in flight, or while peers may be reading from here (:meth:`NixlConnector.serve`), and sleeps otherwise.
"""

import itertools
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from splitserve.handover import ReadCommand, ReadResult
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.digest import DigestBlocks, no_digests
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_reader import MEMORY_KIND, PeerReader, create_agent
from splitserve.messages import MemoryRegion, PeerWelcome
from splitserve.request import Party

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0003
READ_THREADS = 2
SPLIT_ABOVE_BYTES = 4 << 20
CLOSE_SECONDS = 5.0

Event = ReadResult | PeerConnected


class _OwnerThread(ABC):
    """Runs commands, and between them :meth:`poll` for as long as :attr:`is_busy`; sleeps while idle."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def check(self) -> None:
        """Raise what the thread died of: without it nothing would ever complete, and nobody would say so."""
        if self._failure is not None:
            raise RuntimeError(f"thread {self._thread.name} of the NIXL connector died") from self._failure

    def close(self) -> None:
        self.submit(lambda: setattr(self, "_is_closing", True))
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("thread %s is stuck in a transfer; leaving it to the process's end", self._thread.name)

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    @abstractmethod
    def poll(self) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_commands()
                self.poll()
            self.finish()
        except Exception as error:
            self._failure = error

    def _take_commands(self) -> None:
        """Wait for a command: for ever when idle, for one poll interval while something is under way."""
        try:
            self._commands.get(timeout=POLL_SECONDS if self.is_busy else None)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return


class _Server(_OwnerThread):
    """Owns the agent that peers read through; polls while ``active``."""

    def __init__(self, me: Party, memory: KVMemory) -> None:
        super().__init__("nixl-serve")
        self.active = False
        self._agent = create_agent(f"{me}/serve")
        num_bytes = memory.num_blocks * memory.block_bytes
        self._agent.register_memory([(memory.blocks_address, num_bytes, memory.device_index, "")], memory.blocks_kind)
        self._agent.register_memory([(memory.generations_address, memory.num_blocks * 8, 0, "")], MEMORY_KIND)
        self.metadata: bytes = self._agent.get_agent_metadata()

    @property
    def is_busy(self) -> bool:
        return self.active

    def poll(self) -> None:
        if self.active:
            self._agent.get_new_notifs()

    def finish(self) -> None:
        self._agent = None


class _ReadThread(_OwnerThread):
    """Owns one reading agent per peer. Events go to ``emit``."""

    def __init__(self, name: str, memory: KVMemory, digest_blocks: DigestBlocks, emit: Callable[[Event], None]) -> None:
        super().__init__(name)
        self._name = name
        self._memory = memory
        self._digest_blocks = digest_blocks
        self._emit = emit
        self._readers: dict[Party, PeerReader] = {}
        self._num_readers_made = 0

    @property
    def is_busy(self) -> bool:
        return any(reader.is_busy for reader in self._readers.values())

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        self.disconnect(peer)
        self._num_readers_made += 1
        try:
            name = f"{self._name}-{self._num_readers_made}"
            self._readers[peer] = PeerReader(name, self._memory, peer, welcome, self._digest_blocks)
        except Exception as problem:
            logger.warning("can't connect to %s: %s: %s", peer, type(problem).__name__, problem)
            self._emit(PeerConnected(peer, f"{type(problem).__name__}: {problem}"))

    def disconnect(self, peer: Party) -> None:
        reader = self._readers.pop(peer, None)
        if reader is not None:
            self._emit_all(reader.destroy())

    def read(self, command: ReadCommand) -> None:
        reader = self._readers.get(command.peer)
        if reader is None:
            self._emit(ReadResult(command.read_id, f"{command.peer} isn't connected"))
        else:
            reader.waiting.append(command)

    def poll(self) -> None:
        for peer, reader in list(self._readers.items()):
            self._finish_connecting(peer, reader)
            results = reader.start_waiting() + reader.poll()
            if any(result.error is not None for result in results):
                # What failed may have been posted in part: only the agent's end surely stops it, and the connection
                # is broken anyway. The core makes a new one.
                self._readers.pop(peer, None)
                results += reader.destroy()
            self._emit_all(results)

    def finish(self) -> None:
        for peer in list(self._readers):
            self.disconnect(peer)

    def _finish_connecting(self, peer: Party, reader: PeerReader) -> None:
        try:
            problem = reader.poll_probe()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self._emit(PeerConnected(peer, problem or None))
        if problem:
            self.disconnect(peer)

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._emit(event)


@dataclass(slots=True)
class _Connecting:
    """A peer that some read threads have yet to connect to."""

    num_left: int
    error: str | None = None


@dataclass(slots=True)
class _SplitRead:
    """A read whose parts run on several threads. ``results`` are in the order of the parts."""

    results: list[ReadResult | None]


class NixlConnector:
    """See :class:`splitserve.kvconnector.connector.KVConnector`. ``wake`` is called, from other threads, after events;
    ``digest_blocks`` for what has landed."""

    name = "nixl"

    def __init__(
        self, me: Party, memory: KVMemory, wake: Callable[[], None], digest_blocks: DigestBlocks = no_digests
    ) -> None:
        self._memory = memory
        self._wake = wake
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._connecting: dict[Party, _Connecting] = {}
        self._split_reads: dict[int, _SplitRead] = {}
        self._server = _Server(me, memory)
        self._threads = [
            _ReadThread(f"{me}/read-{index}", memory, digest_blocks, partial(self._on_event, index))
            for index in range(READ_THREADS)
        ]
        for thread in (self._server, *self._threads):
            thread.start()

    def metadata(self) -> bytes:
        return self._server.metadata

    def region(self) -> MemoryRegion:
        return MemoryRegion(
            blocks_address=self._memory.blocks_address,
            num_blocks=self._memory.num_blocks,
            block_bytes=self._memory.block_bytes,
            generations_address=self._memory.generations_address,
        )

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        with self._lock:
            self._connecting[peer] = _Connecting(len(self._threads))
        for thread in self._threads:
            thread.submit(partial(thread.connect, peer, welcome))

    def disconnect(self, peer: Party) -> None:
        for thread in self._threads:
            thread.submit(partial(thread.disconnect, peer))

    def read(self, command: ReadCommand) -> None:
        parts = self._parts(command)
        with self._lock:
            self._split_reads[command.read_id] = _SplitRead([None] * len(parts))
        for thread, part in zip(self._threads, parts, strict=False):
            thread.submit(partial(thread.read, part))

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

    def _parts(self, command: ReadCommand) -> list[ReadCommand]:
        """A large read in even parts, one per thread; a small one whole."""
        count = len(command.local_blocks)
        if count < len(self._threads) or count * self._memory.block_bytes <= SPLIT_ABOVE_BYTES:
            return [command]
        bounds = [count * index // len(self._threads) for index in range(len(self._threads) + 1)]
        return [
            ReadCommand(command.read_id, command.peer, command.local_blocks[low:high], command.remote_blocks[low:high])
            for low, high in itertools.pairwise(bounds)
        ]

    # ---- on the read threads ----

    def _on_event(self, part: int, event: Event) -> None:
        with self._lock:
            whole = self._join_connection(event) if isinstance(event, PeerConnected) else self._join_read(part, event)
        if whole is not None:
            self._events.append(whole)
            self._wake()

    def _join_connection(self, event: PeerConnected) -> PeerConnected | None:
        """The peer is connected once every thread is."""
        connecting = self._connecting.get(event.peer)
        if connecting is None:
            return event if event.error else None
        connecting.num_left -= 1
        connecting.error = connecting.error or event.error
        if connecting.num_left:
            return None
        del self._connecting[event.peer]
        return PeerConnected(event.peer, connecting.error)

    def _join_read(self, part: int, result: ReadResult) -> ReadResult | None:
        """A read is terminal once all its parts are: only then nothing can write to its blocks any more."""
        split = self._split_reads[result.read_id]
        split.results[part] = result
        results = [each for each in split.results if each is not None]
        if len(results) < len(split.results):
            return None
        del self._split_reads[result.read_id]
        error = next((each.error for each in results if each.error is not None), None)
        generations = [generation for each in results for generation in each.generations]
        digests = [digest for each in results for digest in each.digests]
        seconds = max(each.seconds for each in results)
        return ReadResult(result.read_id, error, generations, seconds, digests)
