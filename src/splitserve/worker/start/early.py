"""Start of a worker's other ranks, which import for themselves, and of the CUDA driver, before its own imports, which
take seconds. Importing this module is quick."""

import contextlib
import ctypes
import os
import threading
from typing import Any

from splitserve.protocol.config import WorkerConfig
from splitserve.worker.ranks.starts import start_programs


def begin_on_gpu(config: WorkerConfig) -> None:
    """Start the other ranks as programs; initialise the CUDA driver in a thread."""
    start_programs(config.engine)
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before it initialises the driver
    threading.Thread(target=_open_driver, name="cuda-driver", daemon=True).start()


def _open_driver() -> None:
    with contextlib.suppress(OSError):  # PyTorch reports that there is none
        open_context(ctypes.CDLL("libcuda.so.1"))


def open_context(driver: Any) -> bool:
    """Initialise the driver and the primary context of the first GPU, which PyTorch uses, too; returns whether that
    worked. PyTorch reports why not. ``driver``: libcuda, or an object with its functions."""
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )
