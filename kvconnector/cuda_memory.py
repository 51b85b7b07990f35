"""What peers' access to a GPU's memory takes: a context on every thread, memory that CUDA IPC can export."""

import ctypes
import logging

import torch

from splitserve.errors import ConfigError

logger = logging.getLogger(__name__)

_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # of CUpointer_attribute, cuda.h
_LAZY_ENABLE_PEER_ACCESS = 1  # of CUipcMem_flags
IPC_HANDLE_BYTES = 64


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


def make_context_current(device: torch.device) -> None:
    """UCX works with the context that is current on the thread that calls it; a new thread has none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # set_device alone may leave the context for later


def check_ipc_capable(memory: torch.Tensor) -> None:
    """Raise :class:`ConfigError` if other processes can't map ``memory``: UCX would then fall back to copies over the
    host, a hundred times slower, and say nothing."""
    capable = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuPointerGetAttribute(
        ctypes.byref(capable), _IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_void_p(memory.data_ptr())
    )
    if status != 0:
        raise ConfigError(f"CUDA doesn't say whether the KV memory can be shared (cuPointerGetAttribute: {status})")
    if not capable.value:
        raise ConfigError(
            "the KV memory can't be shared with other processes through CUDA IPC: PyTorch allocates expandable "
            "segments or from a memory pool; take expandable_segments and the backend out of PYTORCH_CUDA_ALLOC_CONF"
        )


def export_handles(*memories: torch.Tensor) -> list[bytes]:
    """By which other processes can map the allocations that ``memories`` are in; none of host memory."""
    return [_export_handle(memory) for memory in memories if memory.is_cuda]


def _export_handle(memory: torch.Tensor) -> bytes:
    handle = _IpcHandle()
    status = ctypes.CDLL("libcuda.so.1").cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
    if status != 0:
        raise ConfigError(f"the KV memory can't be shared with other processes (cuIpcGetMemHandle: {status})")
    return bytes(handle.reserved)


class PeerMapping:
    """A peer's GPU memory, mapped into this process until :meth:`close`, in the context that is current.

    UCX maps a peer's memory for each copy, and unmaps it afterwards (``UCX_CUDA_IPC_CACHE=n``): otherwise it would keep
    a dead peer's memory until this process ends. CUDA counts mappings of the same memory, so while this one is there,
    UCX's take no time. A peer on another machine, or one that has just died, can't be mapped: that is no error here.
    """

    def __init__(self, handle: bytes) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._close = driver.cuIpcCloseMemHandle
        self._close.argtypes = [ctypes.c_uint64]
        mapped = ctypes.c_uint64(0)
        driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint]
        status = driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(mapped), _IpcHandle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS
        )
        self._address: int | None = mapped.value if status == 0 else None
        if status != 0:
            logger.info("a peer's GPU memory can't be mapped beforehand (cuIpcOpenMemHandle: %d)", status)

    def close(self) -> None:
        """Nothing reads from it any more. Idempotent."""
        if self._address is not None:
            self._close(self._address)
            self._address = None
