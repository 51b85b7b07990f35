"""Requirements of peers' access to GPU memory: a context on every thread, memory that CUDA IPC can export."""

import ctypes
import logging
from pathlib import Path

import torch

from splitserve.common.errors import ConfigError
from splitserve.protocol.memory_records import MappableMemory

logger = logging.getLogger(__name__)

_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # CUpointer_attribute, cuda.h
_LAZY_ENABLE_PEER_ACCESS = 1  # CUipcMem_flags
IPC_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


def make_context_current(device: torch.device) -> None:
    """Make the device's context current on this thread: UCX uses the calling thread's context, and a new thread has
    none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # set_device alone may defer the creation of the context


class CurrentContext:
    """The CUDA context that is current on the thread that makes this object. ``driver``: libcuda, or an object with its
    functions."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._set_current = driver.cuCtxSetCurrent
        self._set_current.argtypes = [ctypes.c_uint64]
        self._context = ctypes.c_uint64(0)
        driver.cuCtxGetCurrent(ctypes.byref(self._context))

    def enter(self) -> None:
        """Make it current on the calling thread, too."""
        self._set_current(self._context)


def check_ipc_capable(memory: torch.Tensor) -> None:
    """Raise :class:`ConfigError` if other processes can't map ``memory``; UCX would then silently fall back to slow
    copies over the host."""
    capable = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuPointerGetAttribute(
        ctypes.byref(capable), _IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_void_p(memory.data_ptr())
    )
    if status != 0:
        raise ConfigError(
            f"cannot determine whether the KV memory can be shared (cuPointerGetAttribute: status {status})"
        )
    if not capable.value:
        raise ConfigError(
            "the KV memory can't be shared with other processes through CUDA IPC: PyTorch allocates expandable "
            "segments or from a memory pool; take expandable_segments and the backend out of PYTORCH_CUDA_ALLOC_CONF"
        )


def export(*memories: torch.Tensor) -> list[MappableMemory]:
    """Return the handles by which other processes can map ``memories``; host memory has none."""
    exported = []
    for memory in memories:
        if memory.is_cuda:
            with torch.cuda.device(memory.device):  # CUDA finds only allocations of the current context
                exported.append(_export(memory))
    return exported


def _export(memory: torch.Tensor) -> MappableMemory:
    driver, handle, address = ctypes.CDLL("libcuda.so.1"), _IpcHandle(), memory.data_ptr()
    status = driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
    if status != 0:
        raise ConfigError(f"the KV memory can't be shared with other processes (cuIpcGetMemHandle: status {status})")
    allocation = _allocation_of(driver, address)
    if allocation is None:
        raise ConfigError("cannot determine the allocation that holds the KV memory (cuMemGetAddressRange)")
    return MappableMemory(bytes(handle.reserved), address - allocation[0], own_machine())


def own_machine() -> str:
    """Return an id that distinguishes this machine, also across containers, until it reboots; "" if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _allocation_of(driver: ctypes.CDLL, address: int) -> tuple[int, int] | None:
    """Return the address and size in bytes of the allocation that contains ``address``; None if CUDA knows of none."""
    base, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return (base.value, size.value) if status == 0 else None


class PeerMapping:
    """``num_bytes`` of a peer's GPU memory, mapped into the current context until :meth:`close`.

    ``address`` is the address of the mapped bytes. It is 0 if they can't be mapped: the peer is on another machine or
    has just died, or its allocation is smaller than ``num_bytes``. While a mapping exists, UCX maps the same memory at
    almost no cost (CUDA counts mappings). UCX itself caches none (``UCX_CUDA_IPC_CACHE=n``), because it would keep
    those of dead peers.
    """

    def __init__(self, memory: MappableMemory, num_bytes: int) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._close = driver.cuIpcCloseMemHandle
        self._close.argtypes = [ctypes.c_uint64]
        mapped = ctypes.c_uint64(0)
        driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint]
        status = driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(mapped), _IpcHandle.from_buffer_copy(memory.handle), _LAZY_ENABLE_PEER_ACCESS
        )
        self._mapped = mapped.value if status == 0 else 0
        self.address = 0
        if status != 0:
            logger.info("a peer's GPU memory can't be mapped (cuIpcOpenMemHandle: status %d)", status)
            return
        allocation = _allocation_of(driver, self._mapped)
        if allocation is None or memory.offset + num_bytes > allocation[0] + allocation[1] - self._mapped:
            logger.warning("a peer's mapped GPU memory is smaller than the peer declared: %s", allocation)
            return
        self.address = self._mapped + memory.offset

    def close(self) -> None:
        """Unmap the memory; no read may be in flight. Idempotent."""
        if self._mapped:
            self._close(self._mapped)
            self._mapped = self.address = 0
