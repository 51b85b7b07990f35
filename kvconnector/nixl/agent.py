"""A NIXL agent with UCX, as its one owner thread uses it: registered memory, descriptor lists, reads to poll."""

import contextlib
import logging
import os
import weakref
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from splitserve.kvconnector.nixl.ucx_log import UCX_LOG
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_plan import Rows
from splitserve.protocol.memory_records import MemoryKind

HERE = "NIXL_INIT_AGENT"
BlockIds = npt.NDArray[np.int32]
PreparedList = NewType("PreparedList", int)


def _create_agent(name: str, *, telemetry: bool) -> Any:
    try:
        from nixl_cu13 import _api as nixl
    except ImportError:
        from nixl_cu12 import _api as nixl
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes two lines per agent to standard output
    os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")  # otherwise a dead peer's memory stays mapped: see PeerMapping
    with UCX_LOG.watching():
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], capture_telemetry=telemetry)
        return nixl.nixl_agent(name, config)


class Agent:
    """Agent without a progress thread: transfers advance only while :meth:`Transfer.is_done` is called and while the
    peer polls.

    NIXL merges neighbouring descriptors that are adjacent on both sides, so runs of blocks travel as one. Objects that
    NIXL returns keep its agent alive, so none of them leaves this module: only then does :meth:`destroy` end the agent.
    """

    def __init__(self, name: str, *, telemetry: bool = False) -> None:
        self.name = name
        self._nixl = _create_agent(name, telemetry=telemetry)
        self._lists: list[Any] = []
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()

    def register(self, kind: MemoryKind, address: int, num_bytes: int, device_id: int = 0) -> Any:
        """Register memory for transfers of this agent and of peers that have its metadata."""
        return self._nixl.register_memory([(address, num_bytes, device_id, "")], kind.value)

    def deregister(self, registration: Any) -> None:
        self._nixl.deregister_memory(registration)

    def metadata(self) -> bytes:
        data: bytes = self._nixl.get_agent_metadata()
        return data

    def add_remote(self, metadata: bytes) -> str:
        """Add a remote agent and return its name; "" if NIXL rejects its metadata."""
        name = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name or "")

    def prepare(self, agent: str, kind: MemoryKind, rows: Rows) -> PreparedList:
        """Return a descriptor list of ``agent``'s memory (:data:`HERE`: this agent's own), for
        :meth:`read_prepared`."""
        self._lists.append(self._nixl.prep_xfer_dlist(agent, self._nixl.get_xfer_descs(rows, kind.value)))
        return PreparedList(len(self._lists) - 1)

    def read_prepared(
        self, local: PreparedList, local_ids: BlockIds, remote: PreparedList, remote_ids: BlockIds
    ) -> "Transfer":
        """Start reading entries of a prepared remote list into entries of a prepared local one."""
        ours, theirs = self._lists[local], self._lists[remote]
        return self._made(self._nixl.make_prepped_xfer("READ", ours, local_ids, theirs, remote_ids, b"")).post()

    def read_rows(self, agent: str, kind: MemoryKind, local: Rows, remote: Rows) -> "Transfer":
        """Start reading ``remote[i]`` of ``agent`` into ``local[i]``."""
        return self.make_read(agent, kind, local, remote).post()

    def make_read(self, agent: str, kind: MemoryKind, local: Rows, remote: Rows) -> "Transfer":
        """Return a read of ``remote[i]`` of ``agent`` into ``local[i]``, to be posted later."""
        descriptors = (self._nixl.get_xfer_descs(rows, kind.value) for rows in (local, remote))
        return self._made(self._nixl.initialize_xfer("READ", *descriptors, agent, b""))

    def tell(self, agent: str, message: bytes) -> None:
        """Send a message to a remote agent, whose :meth:`progress` returns it. It may be lost."""
        self._nixl.send_notif(agent, message)

    def progress(self) -> list[bytes]:
        """Advance peers' reads from this agent's memory; return the messages that peers sent."""
        told: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        return [message for messages in told.values() for message in messages]

    def destroy(self) -> None:
        """Destroy the agent: the only reliable stop of posted reads. No bytes are written after this returns."""
        for transfer in list(self._transfers):
            transfer.abandon()
        self._lists.clear()
        self._nixl = None

    def _made(self, handle: Any) -> "Transfer":
        transfer = Transfer(self, handle)
        self._transfers.add(transfer)
        return transfer

    def post(self, handle: Any) -> None:
        try:
            self._nixl.transfer(handle)
        except Exception as error:
            raise TransferError(f"posting failed: {type(error).__name__}: {error}") from error

    def state(self, handle: Any) -> str:
        try:
            return str(self._nixl.check_xfer_state(handle))
        except Exception as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def release(self, handle: Any) -> None:
        # A handle that failed may refuse its release; the agent frees it at its own end.
        with contextlib.suppress(Exception):
            self._nixl.release_xfer_handle(handle)


class Transfer:
    """A read. The agent's end ends it, too. Once posted it advances when :meth:`is_done` is called."""

    due_at = 0.0

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def post(self) -> "Transfer":
        """Start the read and return it. Raises :class:`TransferError`; the read is then released."""
        try:
            self._agent.post(self._handle)
        except TransferError:
            self.release()
            raise
        return self

    def rehearse(self) -> "Rehearsal":
        """Start the read and return it as one that may be started once more when it is complete: it then takes half as
        long. Raises :class:`TransferError`."""
        self.post()
        return Rehearsal(self)

    def is_done(self) -> bool:
        """Advance the read; return whether it is complete. Raises :class:`TransferError` if it failed."""
        if not self.has_landed():
            return False
        self.release()
        return True

    def has_landed(self) -> bool:
        """Do the same as :meth:`is_done`, but keep the read, to be started once more."""
        if self._handle is None:
            return True
        state = self._agent.state(self._handle)
        if state not in ("PROC", "DONE"):
            raise TransferError(f"NIXL reports {state}")
        return state == "DONE"

    def release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._agent.release(handle)

    def abandon(self) -> None:
        """Drop the handle, because the agent is about to end."""
        self._handle = None


class Rehearsal:
    """A read in flight that will be started once more."""

    due_at = 0.0

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def is_done(self) -> bool:
        return self._transfer.has_landed()
