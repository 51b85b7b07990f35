"""Reads from one peer through NIXL: an agent, descriptor lists, posting, polling. Used by one thread only."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.errors import HandshakeError
from splitserve.handover import ReadCommand, ReadResult
from splitserve.kvconnector.digest import DigestBlocks
from splitserve.kvconnector.memory import KVMemory
from splitserve.messages import PeerWelcome
from splitserve.request import Party

CONNECT_SECONDS = 5.0
READS_AT_ONCE = 4  # per peer; each needs a scratch row for the generations, further ones wait
MAX_PEER_BLOCKS = 1 << 22  # bounds what a peer's word makes us allocate: 56 bytes per block
MAX_METADATA_BYTES = 1 << 20
_ADDRESS_SPACE_BYTES = 1 << 64
MEMORY_KIND = "DRAM"


def create_agent(name: str) -> Any:
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl_cu13").setLevel(logging.WARNING)
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _block_descriptors(address: int, block_bytes: int, num_blocks: int) -> npt.NDArray[np.uint64]:
    """``[num_blocks, 3]``: address, length, device id of each block."""
    rows = np.zeros((num_blocks, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    return rows


def check_welcome(welcome: PeerWelcome, block_bytes: int) -> None:
    """Raise :class:`HandshakeError` for numbers that no peer's memory can have.

    That is all that can be told from here. Whether the addresses are those that the peer registered is checked by NIXL
    against the peer's metadata, before it reads a byte.
    """
    region = welcome.region
    if not 0 < region.num_blocks <= MAX_PEER_BLOCKS:
        raise HandshakeError(f"the peer claims {region.num_blocks} KV blocks; 1 to {MAX_PEER_BLOCKS} are accepted")
    if region.block_bytes != block_bytes:
        raise HandshakeError(f"the peer's blocks have {region.block_bytes} bytes, ours {block_bytes}")
    for name, address, size in (
        ("blocks", region.blocks_address, region.num_blocks * block_bytes),
        ("generations", region.generations_address, region.num_blocks * 8),
    ):
        if not 0 < address <= _ADDRESS_SPACE_BYTES - size:
            raise HandshakeError(f"the peer's {name} can't be {size} bytes at address {address:#x}")
    if len(welcome.metadata) > MAX_METADATA_BYTES:
        raise HandshakeError(f"the peer's metadata has {len(welcome.metadata)} bytes; at most {MAX_METADATA_BYTES}")


@dataclass(slots=True, eq=False)
class Read:
    """A read under way: first its data, then the span of generations that covers its blocks."""

    command: ReadCommand
    started_at: float
    handle: Any
    scratch_row: int
    reads_generations: bool = False


class PeerReader:
    """Everything for reading from one peer: an agent, descriptor lists, scratch rows. Used by the owner thread only."""

    def __init__(
        self, name: str, memory: KVMemory, party: Party, peer: PeerWelcome, digest_blocks: DigestBlocks
    ) -> None:
        check_welcome(peer, memory.block_bytes)
        self._agent = create_agent(name)
        self._digest_blocks = digest_blocks
        self._region = peer.region
        self._scratch = np.zeros((READS_AT_ONCE, peer.region.num_blocks), dtype=np.uint64)
        self._free_rows = list(range(READS_AT_ONCE))
        self._register(memory.blocks_address, memory.num_blocks * memory.block_bytes)
        self._register(int(self._scratch.ctypes.data), self._scratch.nbytes)
        remote_name = self._agent.add_remote_agent(peer.metadata)
        if not remote_name:
            raise HandshakeError("NIXL didn't accept the peer's metadata")
        self._remote_name = remote_name.decode() if isinstance(remote_name, bytes) else remote_name
        self._local_blocks = self._prepare(
            "NIXL_INIT_AGENT", memory.blocks_address, memory.num_blocks, memory.block_bytes
        )
        try:
            self._remote_blocks = self._prepare(
                self._remote_name, peer.region.blocks_address, peer.region.num_blocks, memory.block_bytes
            )
        except Exception as error:
            raise HandshakeError(f"the peer's blocks aren't in the memory that it registered: {error}") from error
        self.active: list[Read] = []
        self.waiting: deque[ReadCommand] = deque()
        self.connect_deadline = time.monotonic() + CONNECT_SECONDS
        self._probe: Read | None = Read(ReadCommand(0, party, (), (0,)), time.monotonic(), None, self._free_rows.pop())
        self._post_generations(self._probe)

    def _register(self, address: int, num_bytes: int) -> None:
        self._agent.register_memory([(address, num_bytes, 0, "")], MEMORY_KIND)

    def _prepare(self, side: str, address: int, num_blocks: int, block_bytes: int) -> Any:
        rows = _block_descriptors(address, block_bytes, num_blocks)
        return self._agent.prep_xfer_dlist(side, self._agent.get_xfer_descs(rows, MEMORY_KIND))

    @property
    def is_busy(self) -> bool:
        return bool(self.active or self.waiting or self._probe)

    def poll_probe(self) -> str | None:
        """None while the first, tiny read is under way; then "" if it went through, else what went wrong.

        It makes UCX connect now rather than under the first request, and proves that this peer can be read at all.
        """
        if self._probe is None:
            return None
        result = self._advance(self._probe)
        if result is None and time.monotonic() < self.connect_deadline:
            return None
        if result is not None:
            self._probe = None
        return "" if result is not None and result.error is None else "a probe read of its memory didn't complete"

    def start_waiting(self) -> list[ReadResult]:
        """Post waiting reads while there are scratch rows. Returns those that failed at once."""
        failed: list[ReadResult] = []
        while self.waiting and self._free_rows:
            command = self.waiting.popleft()
            read = Read(command, time.monotonic(), None, self._free_rows.pop())
            try:
                self._post_data(read)
            except Exception as error:
                failed.append(self._finish(read, f"posting failed: {error}"))
            else:
                self.active.append(read)
        return failed

    def poll(self) -> list[ReadResult]:
        """Make progress; returns reads that are over."""
        results: list[ReadResult] = []
        for read in list(self.active):
            try:
                result = self._advance(read)
            except Exception as error:
                result = self._finish(read, f"{type(error).__name__}: {error}")
            if result is not None:
                self.active.remove(read)
                results.append(result)
        return results

    def destroy(self) -> list[ReadResult]:
        """Stop everything: nothing is written to local blocks after this returns."""
        over = [ReadResult(read.command.read_id, "disconnected") for read in self.active]
        over += [ReadResult(command.read_id, "disconnected") for command in self.waiting]
        self.active.clear()
        self.waiting.clear()
        self._probe = self._local_blocks = self._remote_blocks = self._agent = None
        return over

    def _post_data(self, read: Read) -> None:
        command = read.command
        read.handle = self._agent.make_prepped_xfer(
            "READ",
            self._local_blocks,
            np.asarray(command.local_blocks, dtype=np.int32),
            self._remote_blocks,
            np.asarray(command.remote_blocks, dtype=np.int32),
            b"",
        )
        self._agent.transfer(read.handle)

    def _post_generations(self, read: Read) -> None:
        read.reads_generations = True
        first, last = min(read.command.remote_blocks), max(read.command.remote_blocks)
        num_bytes = (last - first + 1) * 8
        local = np.array([[self._scratch[read.scratch_row].ctypes.data + first * 8, num_bytes, 0]], dtype=np.uint64)
        remote = np.array([[self._region.generations_address + first * 8, num_bytes, 0]], dtype=np.uint64)
        read.handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, MEMORY_KIND),
            self._agent.get_xfer_descs(remote, MEMORY_KIND),
            self._remote_name,
            b"",
        )
        self._agent.transfer(read.handle)

    def _advance(self, read: Read) -> ReadResult | None:
        while True:
            state = self._agent.check_xfer_state(read.handle)
            if state == "PROC":
                return None
            if state != "DONE":
                return self._finish(read, f"NIXL reports {state}")
            self._release_handle(read)
            if read.reads_generations:
                return self._finish(read, None)
            self._post_generations(read)

    def _finish(self, read: Read, error: str | None) -> ReadResult:
        self._release_handle(read)
        generations: Sequence[int] = ()
        digests: Sequence[bytes] = ()
        if error is None:
            digests = self._digest_blocks(read.command.local_blocks)
            generations = self._scratch[read.scratch_row][np.asarray(read.command.remote_blocks)].tolist()
        self._free_rows.append(read.scratch_row)
        seconds = time.monotonic() - read.started_at
        return ReadResult(read.command.read_id, error, generations, seconds, digests)

    def _release_handle(self, read: Read) -> None:
        if read.handle is not None:
            handle, read.handle = read.handle, None
            # A handle that failed may refuse its release; the agent frees it at its own end.
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(handle)
