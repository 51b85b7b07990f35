"""The connector in the simulator: connections to peers, copies block by block, then the generations."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.joining import ReadJoin, side_by_side
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from splitserve.simulation.model import BLOCK_SIZE

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator
    from splitserve.simulation.worker.driver import SimWorker

CONNECT_SECONDS = 5.0


class SimReader:
    """The reads of one worker. Like the real connector, it breaks a connection whose read failed."""

    def __init__(
        self, sim: "Simulator", worker: "SimWorker", emit: Callable[[ReadResult | PeerConnected], None]
    ) -> None:
        self._sim = sim
        self._worker = worker
        self._emit = emit
        self._connected: dict[Party, SimWorker] = {}
        self._reads: dict[int, ReadCommand] = {}
        self._joins: dict[int, ReadJoin] = {}
        self._landing: set[int] = set()  # reads whose bytes may still arrive, even after they failed
        self._free_at = 0.0

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        """Connect to a peer once earlier disconnects are done; with a frozen peer that may time out."""
        other = self._sim.workers.get(welcome.ranks[0].metadata.decode())
        stalls = other is not None and self._sim.now < other.frozen_until and self._sim.random.random() < 0.5
        delay = CONNECT_SECONDS if stalls else 0.01
        self._sim.at(max(self._sim.now, self._free_at) + delay, lambda: self._finish_connect(peer, other, stalls))

    def _finish_connect(self, peer: Party, other: "SimWorker | None", stalls: bool) -> None:
        if other is None or not other.alive or stalls:
            self._emit(PeerConnected(peer, "a probe read didn't complete"))
        else:
            self._connected[peer] = other
            self._emit(PeerConnected(peer, None))

    def disconnect(self, peer: Party) -> None:
        """Disconnect from a peer: destroying the agent takes a while, in which bytes still land."""
        self._connected.pop(peer, None)
        self._free_at = self._sim.now + self._sim.random.uniform(0.0, self._sim.faults.disconnect_seconds)
        for read_id in self._reads_from(peer):
            self._sim.at(self._free_at, partial(self._end, read_id))

    def _end(self, read_id: int) -> None:
        self._end_landing([read_id])
        self._finish(ReadResult(read_id, "disconnected"))

    def start(self, command: ReadCommand) -> None:
        """Copy block by block at random moments, then read the generations; or fail, or end late, or never."""
        sim, faults = self._sim, self._sim.faults
        same_group = (other for other in self._reads.values() if other.group == command.group)
        in_flight = {block_id for other in same_group for block_id in other.local_blocks}
        assert not in_flight & set(command.local_blocks), "two reads write to one block"
        num_readable = sim.workers[str(command.peer)].num_readable
        assert all(0 <= block < num_readable for block in command.remote_blocks), "a read of a missing block"
        self._reads[command.read_id] = command
        self._joins[command.read_id] = ReadJoin(self._worker.num_ranks)
        self._landing.add(command.read_id)
        source = self._connected.get(command.peer)
        if source is None or sim.random.random() < faults.post_error:
            sim.after(0.0, lambda: self._fail(command, "posting failed"))
            return
        taken = self._worker.stamp(command.local_blocks, command.group)
        for rank in range(self._worker.num_ranks):
            self._start_rank(command, source, taken, rank)

    def _start_rank(self, command: ReadCommand, source: "SimWorker", taken: dict[int, int], rank: int) -> None:
        sim, faults = self._sim, self._sim.faults
        fate = sim.random.random()
        is_late = sim.random.random() < faults.read_late
        time = sim.now
        for local, remote in zip(command.local_blocks, command.remote_blocks, strict=True):
            time += sim.random.uniform(0.0, faults.read_seconds)
            if is_late:
                time += sim.random.uniform(0.0, 2 * sim.protocol.read_deadline_seconds)
            sim.at(time, partial(self._copy, command, source, {local: taken[local]}, remote, rank))
        time += sim.random.uniform(0.0, 0.005)
        if fate < faults.read_error:
            sim.at(time, lambda: self._fail(command, "planted read error"))
        elif fate >= faults.read_error + faults.read_stuck:
            sim.at(time, lambda: self._read_generations(command, source, rank))

    def _copy(
        self, command: ReadCommand, source: "SimWorker", destination: dict[int, int], remote: int, rank: int
    ) -> None:
        """Copy the heads of one of the reader's ranks, whatever ranks the source has."""
        if command.read_id in self._landing and source.alive and self._worker.alive:
            self._worker.assert_kept(destination, "a read", command.group)
            (local,) = destination
            heads = self._worker.heads_of(rank)
            part = slice(heads.start * BLOCK_SIZE, heads.stop * BLOCK_SIZE)
            block = self._worker.memories[command.group][local]
            block[part] = source.readable(remote, command.group)[part]
            if self._sim.random.random() < self._sim.faults.damage:
                block[part.start + self._sim.random.randrange(BLOCK_SIZE)] ^= 1

    def _read_generations(self, command: ReadCommand, source: "SimWorker", rank: int) -> None:
        if self._sim.now < source.frozen_until and self._sim.random.random() < 0.5:  # TCP needs the source's help
            self._sim.at(source.frozen_until, lambda: self._read_generations(command, source, rank))
        elif source.alive:
            generations = [source.generation(block, command.group) for block in command.remote_blocks]
            self._join(rank, ReadResult(command.read_id, None, generations))
        else:
            self._fail(command, "the source died")

    def _join(self, rank: int, result: ReadResult) -> None:
        """End a read when it has ended on all ranks, by the production code; digests cover all heads."""
        if result.read_id not in self._reads:
            return
        results = self._joins[result.read_id].add(rank, result)
        if results is not None:
            command = self._reads[result.read_id]
            digests = self._worker.digest_blocks(command.local_blocks, command.group)
            self._finish(msgspec.structs.replace(side_by_side(results), digests=digests))

    def _fail(self, command: ReadCommand, error: str) -> None:
        """Break the connection, which ends all reads from the peer, on all ranks."""
        if command.read_id in self._reads:
            self._connected.pop(command.peer, None)
            others = [read_id for read_id in self._reads_from(command.peer) if read_id != command.read_id]
            self._end_landing([command.read_id, *others])
            self._finish(ReadResult(command.read_id, error))
            for read_id in others:
                self._finish(ReadResult(read_id, "disconnected"))

    def _end_landing(self, read_ids: Iterable[int]) -> None:
        """Note that agents are destroyed: nothing of these reads lands from now on."""
        self._landing.difference_update(read_ids)

    def _finish(self, result: ReadResult) -> None:
        if self._reads.pop(result.read_id, None) is not None:
            del self._joins[result.read_id]
            self._emit(result)

    def _reads_from(self, peer: Party) -> list[int]:
        return [read_id for read_id, command in self._reads.items() if command.peer == peer]
