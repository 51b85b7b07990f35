"""KV transfers of a tensor-parallel worker: every rank moves its own heads; rank 0 sends commands to the others.

Rank 0's engine loop sees one connector. It passes each command to all ranks, and returns an event when all of them have
reported: a read has succeeded when it has on every rank, and is terminal when no rank's blocks can be written any more.
Rank 0 and each other rank share a pipe with msgpack messages, separate from the steps' pipe: reads wait for no step.
Commands of copies, and events, travel as they are; the connector's methods have messages of their own here.
"""

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.kvconnector.ranks.event_sender import EventSender
from splitserve.kvconnector.tiers.commands import (
    AnyCommand,
    AnyResult,
    CancelCommand,
    ClearCommand,
    CopyCommand,
    CopyNearsEnd,
    CopyResult,
)
from splitserve.kvconnector.tiers.copies import AnyStore, LocalTierCopier
from splitserve.kvconnector.tiers.shared import ChainCopy, TierState
from splitserve.kvconnector.transfer.connector import KVConnector, PeerConnected, ServedMemory
from splitserve.kvconnector.transfer.joining import ConnectionJoin, ReadJoin, side_by_side
from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadResult
from splitserve.protocol.memory_records import RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

logger = logging.getLogger(__name__)

AWAKE_SECONDS = 0.002
"""The longest time for which rank 0 stays awake for the other ranks' parts of a read, if its own is awaited: where no
rank's is, they take longer."""
CHECK_SECONDS = 1.0
CLOSE_SECONDS = 5.0


class RankConnect(msgspec.Struct, frozen=True, tag=True):
    peer: Party
    welcome: PeerWelcome
    attempt: int


class RankDisconnect(msgspec.Struct, frozen=True, tag=True):
    peer: Party


class RankServe(msgspec.Struct, frozen=True, tag=True):
    readers: Readers


class RankRead(msgspec.Struct, frozen=True, tag=True):
    command: ReadCommand
    awaited: bool


class RankLeave(msgspec.Struct, frozen=True, tag=True):
    """Order to await no reads any more."""


class RankEnd(msgspec.Struct, frozen=True, tag=True):
    """Order to end the transfers and close the channel."""


class RankServes(msgspec.Struct, frozen=True, tag=True):
    """First message: the memory that peers may read, and the hashes and slots that were ``found`` in its tiers."""

    memory: RankMemory
    found: dict[str, list[tuple[bytes, int]]] = {}


class RankConnected(msgspec.Struct, frozen=True, tag=True):
    """Outcome of the :class:`RankConnect` with this ``attempt``."""

    attempt: int
    event: PeerConnected


RankCommand: TypeAlias = RankConnect | RankDisconnect | RankServe | RankRead | RankLeave | RankEnd | AnyCommand
RankEvent: TypeAlias = RankServes | RankConnected | ReadResult | CopyResult | TierState

_encoder = msgspec.msgpack.Encoder(enc_hook=list)  # of sequences that msgpack has no type for
_commands = msgspec.msgpack.Decoder(RankCommand)
_events = msgspec.msgpack.Decoder(RankEvent)


class TransferRankError(SplitserveError):
    """The transfers of another rank have ended: this worker's can't continue."""


class RankedConnector:
    """Rank 0's :class:`splitserve.kvconnector.transfer.connector.KVConnector`; ``local`` performs its own part.

    ``channels`` lead to :class:`RankTransfers` of ranks 1, 2, ...: call :meth:`events` when one of them can be read.
    ``found`` is the content that each of them found in its tiers, by tier name. Waits until all ranks have declared
    their memory. Raises :class:`TransferRankError` if one ends before.
    """

    awaits_beside_steps = False  # other ranks don't know when a step is planned

    def __init__(self, local: KVConnector, channels: Sequence[Connection]) -> None:
        self.name = local.name
        self._local = local
        self._channels = channels
        self._arrivals = select.poll()
        for channel in channels:
            self._arrivals.register(channel.fileno(), select.POLLIN)
        self._rank_of = {channel.fileno(): index + 1 for index, channel in enumerate(channels)}
        self._num_attempts = 0
        self._connecting: dict[Party, tuple[int, ConnectionJoin]] = {}  # with the numbers of the attempts
        self._reads: dict[int, ReadJoin] = {}
        self._remote_events: deque[tuple[int, ReadResult | RankConnected]] = deque()
        self._copy_results: deque[tuple[int, AnyResult]] = deque()
        self._lost_ranks: list[int] = []
        self._are_reads_awaited = False  # on some rank, perhaps
        self._awake_until = 0.0
        others = [_first_words(channel, index + 1) for index, channel in enumerate(channels)]
        self._memories = [*local.served().ranks, *(other.memory for other in others)]
        self.found = [other.found for other in others]

    def served(self) -> ServedMemory:
        return ServedMemory(self.name, self._local.served().generations_addresses, self._memories)

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        self._num_attempts += 1
        self._connecting[peer] = self._num_attempts, ConnectionJoin(1 + len(self._channels))
        self._tell(RankConnect(peer, welcome, self._num_attempts))
        self._local.connect(peer, welcome)

    def disconnect(self, peer: Party) -> None:
        self._connecting.pop(peer, None)
        self._tell(RankDisconnect(peer))
        self._local.disconnect(peer)

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        self._reads[command.read_id] = ReadJoin(1 + len(self._channels))
        self._tell(RankRead(command, awaited))
        self._local.read(command, awaited=awaited)
        self._are_reads_awaited |= awaited
        if awaited and self._local.is_landing():
            self._awake_until = time.monotonic() + AWAKE_SECONDS

    def is_landing(self) -> bool:
        if self._local.is_landing():
            return True
        if not self._reads or time.monotonic() >= self._awake_until:
            return False
        return not self._arrivals.poll(0)

    def leave(self) -> None:
        if self._are_reads_awaited:
            self._are_reads_awaited, self._awake_until = False, 0.0
            self._tell(RankLeave())
            self._local.leave()

    @property
    def num_other_ranks(self) -> int:
        return len(self._channels)

    def copy(self, command: AnyCommand) -> None:
        """Send the command to the other ranks, too; :meth:`copy_results` returns their results."""
        self._tell(command)

    def copy_results(self) -> list[tuple[int, AnyResult]]:
        """Return other ranks' results since the last call, with their rank numbers; one from each rank for each
        copy."""
        self._receive()
        results: list[tuple[int, AnyResult]] = []
        while self._copy_results:
            results.append(self._copy_results.popleft())
        return results

    def serve(self, readers: Readers) -> None:
        self._tell(RankServe(readers))
        self._local.serve(readers)

    def events(self) -> list[ReadResult | PeerConnected]:
        """Return the joined events since the last call. Raises :class:`TransferRankError` once a rank's transfers have
        ended."""
        self._receive()
        if self._lost_ranks:
            raise TransferRankError(f"the KV transfers of rank {self._lost_ranks[0]} have ended")
        whole: list[ReadResult | PeerConnected] = []
        parts: list[tuple[int, ReadResult | PeerConnected | RankConnected]]
        parts = [(0, event) for event in self._local.events()]
        while self._remote_events:
            parts.append(self._remote_events.popleft())
        for rank, event in parts:
            joined = self._join(rank, event)
            if joined is not None:
                whole.append(joined)
        return whole

    def close(self) -> None:
        """End the transfers of all ranks. Waits for each of the others, for ``CLOSE_SECONDS`` at most."""
        self._tell(RankEnd())
        self._local.close()
        for channel in self._channels:
            with contextlib.suppress(EOFError, OSError):
                while channel.poll(CLOSE_SECONDS):
                    channel.recv_bytes()
            channel.close()

    def _join(self, rank: int, event: ReadResult | PeerConnected | RankConnected) -> ReadResult | PeerConnected | None:
        if isinstance(event, ReadResult):
            results = self._reads[event.read_id].add(rank, event)
            if results is None:
                return None
            del self._reads[event.read_id]
            return side_by_side(results)
        own = event.event if isinstance(event, RankConnected) else event
        attempt, join = self._connecting.get(own.peer, (0, None))
        if join is None or (isinstance(event, RankConnected) and event.attempt != attempt):
            return None
        connected = join.add(own)
        if connected is not None:
            del self._connecting[own.peer]
        return connected

    def _tell(self, command: RankCommand) -> None:
        data = _encoder.encode(command)
        for index, channel in enumerate(self._channels):
            try:
                channel.send_bytes(data)
            except OSError:
                self._lose(index + 1)

    def _receive(self) -> None:
        """Take what the other ranks have sent: by the engine's loop itself, which would wake up later after a thread
        that listens."""
        while ready := self._arrivals.poll(0):
            for file_descriptor, _ in ready:
                rank = self._rank_of[file_descriptor]
                try:
                    event = _events.decode(self._channels[rank - 1].recv_bytes())
                except (EOFError, OSError):
                    self._arrivals.unregister(file_descriptor)
                    self._lose(rank)
                    continue
                if isinstance(event, RankConnected | ReadResult):
                    self._remote_events.append((rank, event))
                elif isinstance(event, CopyResult | TierState):
                    self._copy_results.append((rank, event))

    def _lose(self, rank: int) -> None:
        if rank not in self._lost_ranks:
            self._lost_ranks.append(rank)


def _first_words(channel: Connection, rank: int) -> RankServes:
    """Wait until a rank declares its memory, however long it loads. Its end is the channel's."""
    try:
        event = _events.decode(channel.recv_bytes())
    except (EOFError, OSError) as error:
        raise TransferRankError(f"rank {rank} ended before it declared its memory") from error
    if not isinstance(event, RankServes):
        raise TransferRankError(f"rank {rank} began with {type(event).__name__}, not with its memory")
    return event


class RankTransfers:
    """The part of a rank above 0: executes the commands of ``channel``, with a connector of its own.

    ``make_connector`` gets the function that the connector calls when it has events; ``stores`` hold this rank's heads
    of the blocks in tiers; ``found`` is the content that they hold at start.
    """

    def __init__(
        self,
        make_connector: Callable[[Callable[[], None]], KVConnector],
        channel: Connection,
        stores: Mapping[str, AnyStore] = MappingProxyType({}),
        found: Mapping[str, Sequence[tuple[bytes, int]]] = MappingProxyType({}),
    ) -> None:
        self._channel = channel
        self._sender = EventSender(channel)
        self._sending = threading.Lock()
        self._has_ended = False
        self._attempts: dict[Party, int] = {}  # the latest one to connect to each peer
        self._connector = make_connector(self._pass_events_on)
        (memory,) = self._connector.served().ranks
        self._send(RankServes(memory, {name: list(contents) for name, contents in found.items()}))
        with self._sending:  # a store may report at once, on a thread of its own
            self._copies = LocalTierCopier(stores, self._pass_copies_on)

    def run(self) -> None:
        """Execute commands until rank 0 orders the end or is gone. Raises the connector's failure."""
        waiting = select.poll()  # once: Connection.poll makes one each time, after a command has come
        waiting.register(self._channel.fileno(), select.POLLIN)
        try:
            while not self._has_ended:
                if waiting.poll(CHECK_SECONDS * 1e3):
                    self._carry_out(_commands.decode(self._channel.recv_bytes()))
                while self._connector.is_landing() and not waiting.poll(0):
                    pass
                self._pass_events_on()  # raises if a thread of the connector has failed
        except (EOFError, OSError):
            logger.warning("rank 0 is gone")
        finally:
            self._copies.close(CLOSE_SECONDS)
            self._connector.close()
            self._sender.close(CLOSE_SECONDS)
            self._channel.close()

    def _carry_out(self, command: RankCommand) -> None:
        match command:
            case RankConnect(peer, welcome, attempt):
                with self._sending:  # whatever is sent after this is the outcome of this attempt
                    self._attempts[peer] = attempt
                    self._connector.connect(peer, welcome)
            case RankDisconnect(peer):
                with self._sending:
                    self._attempts.pop(peer, None)
                    self._connector.disconnect(peer)
            case RankRead(read, awaited):
                self._connector.read(read, awaited=awaited)
            case RankLeave():
                self._connector.leave()
            case CopyCommand() | ChainCopy() | CancelCommand() | ClearCommand():
                self._copies.start(command)
            case RankServe(readers):
                self._connector.serve(readers)
            case RankEnd():
                self._has_ended = True

    def _pass_events_on(self) -> None:
        with self._sending:  # in order
            for event in self._connector.events():
                if isinstance(event, PeerConnected):
                    self._put(RankConnected(self._attempts.get(event.peer, 0), event))
                else:
                    self._put(event)

    def _pass_copies_on(self) -> None:
        """Send the results of copies. Runs on the thread of a copy; rank 0 may be gone."""
        with self._sending, contextlib.suppress(OSError):
            for result in self._copies.results():
                if not isinstance(result, CopyNearsEnd):  # a step would have to wait on all ranks' devices
                    self._put(result)

    def _send(self, event: RankEvent) -> None:
        with self._sending:
            self._put(event)

    def _put(self, event: RankEvent) -> None:
        self._sender.send(_encoder.encode(event))
