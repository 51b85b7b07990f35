"""What peers' access to a GPU's memory takes: a context on every thread, memory that CUDA IPC can export."""

import ctypes

import torch

from splitserve.errors import ConfigError

_IS_LEGACY_CUDA_IPC_CAPABLE = 10  # of CUpointer_attribute, cuda.h


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
