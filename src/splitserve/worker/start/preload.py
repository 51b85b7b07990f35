"""Loads the attention kernels in a thread while the weights load: one waits for files, the other for a compiler."""

import threading

import torch

from splitserve.kernels.api import AttentionShape, Kernels, PagedBatch
from splitserve.worker.start.clock import StartClock


class AttentionPreload:
    """Begins when it's created. Only the process's caches remember what it did."""

    def __init__(self, kernels: Kernels, shape: AttentionShape, clock: StartClock) -> None:
        self._kernels = kernels
        self._shape = shape
        self._clock = clock
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="attention-preload", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the preload is over. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._clock.phase("attention kernels, beside the weights"), torch.inference_mode():
                self._load()
        except Exception as error:
            self._error = error

    def _load(self) -> None:
        """A decode token, a chunk, and both in one step, over a block of memory."""
        shape = self._shape
        if shape.device.type == "cuda":
            torch.cuda.set_device(shape.device)  # a thread begins with the first one
        attention = self._kernels.make_attention(shape)
        size = (1, shape.num_layers, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        kv_layer = torch.zeros(size, dtype=shape.dtype, device=shape.device)[:, 0]
        for query_lens in ([1], [2], [1, 2]):
            plan = attention.plan(PagedBatch(query_lens, [2] * len(query_lens), [[0]] * len(query_lens)))
            query = torch.zeros(
                (sum(query_lens), shape.num_heads, shape.head_dim), dtype=shape.dtype, device=shape.device
            )
            attention.run(query, kv_layer, plan)
        if shape.device.type == "cuda":
            torch.cuda.synchronize(shape.device)
