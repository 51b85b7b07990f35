"""KV connector between workers of one process, by plain copies: for tests of everything except the transport."""

import threading
from collections import deque
from collections.abc import Callable

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.transfer.connector import PeerConnected, ServedMemory
from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadResult
from splitserve.protocol.memory_records import RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party


class InprocRegistry:
    """Registry by which connectors of one process find each other's memory."""

    def __init__(self) -> None:
        self.memories: dict[bytes, KVMemory] = {}


class InprocConnector:
    """A :class:`splitserve.kvconnector.transfer.connector.KVConnector` whose reads have ended when :meth:`read`
    returns."""

    name = "inproc"
    awaits_beside_steps = True

    def __init__(self, me: Party, memory: KVMemory, wake: Callable[[], None], registry: InprocRegistry) -> None:
        self._memory = memory
        self._wake = wake
        self._registry = registry
        self._token = str(me).encode()
        self._peers: dict[Party, KVMemory] = {}
        self._events: deque[ReadResult | PeerConnected] = deque()
        self._lock = threading.Lock()
        registry.memories[self._token] = memory

    def served(self) -> ServedMemory:
        rank = RankMemory(self._token, [group.region() for group in self._memory.groups])
        return ServedMemory(self.name, self._memory.generations_addresses, [rank])

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        memory = self._registry.memories.get(welcome.ranks[0].metadata)
        if memory is not None:
            self._peers[peer] = memory
        self._emit(PeerConnected(peer, None if memory is not None else "no such worker in this process"))

    def disconnect(self, peer: Party) -> None:
        self._peers.pop(peer, None)

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:  # noqa: ARG002
        remote = self._peers.get(command.peer)
        if remote is None:
            self._emit(ReadResult(command.read_id, f"{command.peer} isn't connected"))
            return
        mine, theirs = self._memory.groups[command.group], remote.groups[command.group]
        with self._lock:
            for local_id, remote_id in zip(command.local_blocks, command.remote_blocks, strict=True):
                mine.bytes[local_id].copy_(theirs.bytes[remote_id])
            generations = [int(theirs.generations[block_id]) for block_id in command.remote_blocks]
        self._emit(ReadResult(command.read_id, None, generations))

    def is_landing(self) -> bool:
        return False

    def leave(self) -> None:
        """Do nothing: no read is in flight."""

    def serve(self, readers: Readers) -> None:
        """Do nothing: a copy needs no help from its source."""

    def events(self) -> list[ReadResult | PeerConnected]:
        events: list[ReadResult | PeerConnected] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        self._registry.memories.pop(self._token, None)

    def _emit(self, event: ReadResult | PeerConnected) -> None:
        self._events.append(event)
        self._wake()
