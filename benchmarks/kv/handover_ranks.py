"""Ranks of two workers as processes, for ``splitserve bench handover``: one side reads the other's KV.

Each rank has KV memory of its own on a device of its own, as in production, and the production connector. Each block
holds numbers that identify it, so that the data read can be checked.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.agent import Agent
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.transfer.connector import Link, PeerConnected
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadResult
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind, RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

SOURCE = Party("source", 1)
SINK = Party("sink", 2)
FIRST_GENERATION = 1000
PATTERN = 251  # the numbers below this are exact in every dtype
EVENT_TIMEOUT_SECONDS = 60.0
# Consecutive copies between GPUs: long enough that those of several ranks, which share links, overlap.
COPIES_IN_A_ROW = 4
START_TIMEOUT_SECONDS = 180.0
STAGES = {
    "commanded": "the call of the connector",
    "woken": "from the start until the reading thread has begun; 0 if the commanding thread waits itself",
    "queued": "until all copies are queued",
    "copied": "from the start until the data has landed",
    "verified": "until the generations have been read",
    "noticed": "the rest: the commanding thread has the result; without a mapping also the reading thread's wake-up",
}


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Rank of a worker, and its device."""

    layout: LayoutRecord
    rank: int
    num_blocks: int
    device: str  # in PyTorch's notation

    def memory(self) -> KVMemory:
        torch.set_num_threads(1)
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return KVMemory(self.layout, self.num_blocks, device)


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of a read on one rank, from the command to the verified result; its path; seconds of its stages by name, see
    :data:`STAGES`."""

    seconds: float
    path: str
    stages: dict[str, float]


def _content(setup: RankSetup, block_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the source's content of each block's heads, ``[len(block_ids), heads]``."""
    blocks = torch.tensor(list(block_ids), device=device).unsqueeze(1)
    heads = torch.tensor(list(setup.layout.block_layout.heads(setup.rank)), device=device).unsqueeze(0)
    return (blocks * 7 + heads) % PATTERN


def serve_source(setup: RankSetup, serve_poll_seconds: float, pipe: Connection) -> None:
    """Serve KV with known content until the parent closes the pipe: main of a source rank."""
    memory = setup.memory()
    for first in range(0, setup.num_blocks, 64):
        ids = range(first, min(first + 64, setup.num_blocks))
        content = _content(setup, ids, memory.device).to(memory.blocks.dtype)
        memory.blocks[first : first + len(ids)] = content[:, None, :, None, None, None]
    memory.generations[:] = FIRST_GENERATION + np.arange(setup.num_blocks, dtype=np.uint64)
    if memory.device.type == "cuda":
        torch.cuda.synchronize()
    settings = ReadSettings.of(memory.kind, num_threads=1, serve_poll_seconds=serve_poll_seconds)
    connector = NixlConnector(SOURCE, memory, lambda: None, rank=setup.rank, settings=settings)
    connector.serve(Readers.READING)
    pipe.send(connector.served())
    pipe.recv()
    connector.close()


class SinkRank:
    """Reading rank, in its own process: commands are its methods' names with arguments. ``source_devices``: devices
    from which it reads, an even part from each."""

    def __init__(self, setup: RankSetup, source_devices: Sequence[str]) -> None:
        self._setup = setup
        self._source_devices = [torch.device(name) for name in source_devices]
        self._memory = setup.memory()
        self._woken = threading.Event()
        self._connector: NixlConnector | None = None
        self._num_reads = 0
        self._baseline: torch.Tensor | None = None
        self._sources: list[torch.Tensor] = []

    def connect(self, welcome: PeerWelcome, settings: ReadSettings) -> Link | None:
        self.close()
        self._welcome = welcome
        rank = self._setup.rank
        self._connector = NixlConnector(SINK, self._memory, self._woken.set, rank=rank, settings=settings)
        self._connector.connect(SOURCE, welcome)
        event = self._wait()
        if not isinstance(event, PeerConnected) or event.error:
            raise RuntimeError(f"the reader couldn't connect: {event}")
        return event.link

    def read(self, local: Sequence[int], remote: Sequence[int]) -> Timing:
        assert self._connector is not None
        self._num_reads += 1
        started = time.perf_counter()
        self._connector.read(ReadCommand(self._num_reads, SOURCE, local, remote), awaited=True)  # as by an idle worker
        commanded = time.perf_counter() - started
        result = self._wait()
        seconds = time.perf_counter() - started
        if not isinstance(result, ReadResult) or result.error:
            raise RuntimeError(f"a read failed: {result}")
        if list(result.generations) != [FIRST_GENERATION + block_id for block_id in remote]:
            raise RuntimeError("a read returned the wrong generations")
        stages = {"commanded": commanded, **msgspec.structs.asdict(result.stages), "verified": result.seconds}
        return Timing(seconds, str(result.path), {**stages, "noticed": max(0.0, seconds - result.seconds)})

    def check(self, local: Sequence[int], remote: Sequence[int]) -> None:
        """Check all heads of all blocks. Raises RuntimeError unless they have the source's content."""
        expected = _content(self._setup, remote, self._memory.device).to(self._memory.blocks.dtype)
        for low in range(0, len(local), 64):
            ids = torch.tensor(list(local[low : low + 64]), device=self._memory.device)
            landed = self._memory.blocks[ids]
            if not bool((landed == expected[low : low + 64, None, :, None, None, None]).all()):
                raise RuntimeError(f"blocks {list(local[low : low + 64])} haven't the source's bytes")
        self._memory.blocks[list(local)] = 0
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize()  # the next read's copies don't wait for this stream

    def copy(self, local: Sequence[int], remote: Sequence[int]) -> float:
        """Copy as many bytes without a connector: a piece from each GPU from which the rank reads, or block by block in
        host memory. Returns the seconds."""
        num_bytes = len(local) * self._memory.block_bytes
        if self._memory.kind is MemoryKind.VRAM:
            return self._copy_between_gpus(num_bytes)
        if self._baseline is None:
            self._baseline = KVMemory(self._setup.layout, self._setup.num_blocks).blocks
        started = time.perf_counter()
        for mine, theirs in zip(local, remote, strict=True):
            self._memory.blocks[mine].copy_(self._baseline[theirs])
        return time.perf_counter() - started

    def _copy_between_gpus(self, num_bytes: int) -> float:
        part = num_bytes // len(self._source_devices)
        if not self._sources or self._sources[0].nbytes < part:
            self._sources = [torch.zeros(part, dtype=torch.uint8, device=device) for device in self._source_devices]
        here = self._memory.blocks.view(-1).view(torch.uint8)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for device in (*self._source_devices, self._memory.device):
            torch.cuda.synchronize(device)
        start.record()
        for _ in range(COPIES_IN_A_ROW):
            for index, source in enumerate(self._sources):
                here[index * part : (index + 1) * part].copy_(source[:part], non_blocking=True)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / COPIES_IN_A_ROW

    def pieces(self, num_bytes: int, piece_bytes: int, seed: int) -> float:
        """Read ``num_bytes`` in shuffled pieces, a descriptor each, as for a layout per layer; returns the seconds."""
        agent = Agent(f"pieces-{seed}")
        ours, theirs = self._memory.region(), self._welcome.ranks[0].region
        agent.register(ours.kind, ours.blocks_address, ours.num_blocks * ours.block_bytes, ours.device_id)
        peer = agent.add_remote(self._welcome.ranks[0].metadata)
        count = num_bytes // piece_bytes
        rows = []
        for region in (ours, theirs):
            order = np.random.default_rng(seed).permutation(region.num_blocks * region.block_bytes // piece_bytes)
            table = np.empty((count, 3), dtype=np.uint64)
            table[:, 0] = region.blocks_address + order[:count].astype(np.uint64) * np.uint64(piece_bytes)
            table[:, 1:] = piece_bytes, region.device_id
            rows.append(table)
            seed += 1
        seconds = []
        for _ in range(2):  # the first one connects
            started = time.perf_counter()
            transfer = agent.read_rows(peer, ours.kind, *rows)
            while not transfer.is_done():
                time.sleep(0.00005)
            seconds.append(time.perf_counter() - started)
        agent.destroy()
        return seconds[-1]

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
            self._connector = None

    def _wait(self) -> ReadResult | PeerConnected:
        assert self._connector is not None
        deadline = time.monotonic() + EVENT_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            while self._connector.is_landing():
                pass
            self._woken.wait(1.0)
            self._woken.clear()
            events = self._connector.events()
            if events:
                return events[0]
        raise RuntimeError(f"no answer from the connector within {EVENT_TIMEOUT_SECONDS:.0f} s")


def run_sink(setup: RankSetup, source_devices: Sequence[str], pipe: Connection) -> None:
    """Carry out commands until the parent closes the pipe: main of a sink rank."""
    rank = SinkRank(setup, source_devices)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, arguments = order
        try:
            pipe.send(getattr(rank, name)(*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    rank.close()


class Sinks:
    """Reading worker: each call goes to all of its ranks at once."""

    def __init__(self, pipes: Sequence[Connection], welcome: PeerWelcome) -> None:
        self._pipes = pipes
        self.welcome = welcome

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks; returns their results. Raises RuntimeError if one failed."""
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return [_receive(pipe) for pipe in self._pipes]

    def first(self, name: str, *arguments: Any) -> Any:
        """Call a method on rank 0 alone; returns its result."""
        self._pipes[0].send((name, arguments))
        return _receive(self._pipes[0])


@contextmanager
def two_workers(sources: Sequence[RankSetup], sinks: Sequence[RankSetup], serve_poll_seconds: float) -> Iterator[Sinks]:
    """Start all ranks of both workers; they aren't connected yet."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    try:
        for target, setups in ((serve_source, sources), (run_sink, sinks)):
            for setup in setups:
                ours, theirs = context.Pipe()
                extra = serve_poll_seconds if target is serve_source else _read_from(setup, sources)
                child = context.Process(target=target, args=(setup, extra, theirs), daemon=True)
                child.start()
                theirs.close()
                pipes.append(ours)
                children.append(child)
        answers = [_receive(pipe, START_TIMEOUT_SECONDS) for pipe in pipes]
        served = answers[: len(sources)]
        ranks: list[RankMemory] = [memory for each in served for memory in each.ranks]
        welcome = PeerWelcome(sources[0].layout, served[0].connector, list(served[0].generations_addresses), ranks)
        yield Sinks(pipes[len(sources) :], welcome)
    finally:
        for pipe in pipes:
            _hang_up(pipe)
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()


def _read_from(sink: RankSetup, sources: Sequence[RankSetup]) -> list[str]:
    return [
        sources[span.rank].device for span in sink.layout.block_layout.spans(sink.rank, sources[0].layout.block_layout)
    ]


def _receive(pipe: Connection, seconds: float = EVENT_TIMEOUT_SECONDS + 30.0) -> Any:
    if not pipe.poll(seconds):
        raise RuntimeError(f"a rank's process sent nothing for {seconds:.0f} s")
    try:
        answer = pipe.recv()
    except EOFError as error:
        raise RuntimeError("a rank's process has died") from error
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def _hang_up(pipe: Connection) -> None:
    try:
        pipe.send(None)
    except OSError:
        return
