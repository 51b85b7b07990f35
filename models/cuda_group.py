"""The collectives of ranks on GPUs of one machine: NCCL, and kernels that reach into the peers' memory.

No operation uses NVLink's multicast (NVLS): it is switched off unless the user's environment says otherwise, since it
takes memory and a working fabric manager, and gains nothing at the sizes of a step.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C._distributed_c10d import Store

from splitserve.models.all_reduce import (
    CAPACITY_BYTES,
    FLAGLESS_CAPACITY_BYTES,
    Add,
    AllReduce,
    ChosenAllReduce,
    KernelAllReduce,
    NcclAllReduce,
    choose,
)
from splitserve.models.parallel import shown_as_ours
from splitserve.models.shard import Shard

if TYPE_CHECKING:
    from splitserve.kernels.triton_all_reduce import PeerMemory

logger = logging.getLogger(__name__)

STEP_SECONDS = 600.0
_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",  # ranks are processes of one machine
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class CudaCollectives:
    """See :class:`splitserve.models.parallel.Collectives`. Works in the current stream, and can be captured."""

    def __init__(self, store: Store, shard: Shard, device: torch.device) -> None:
        """Waits for all ranks. ``device`` becomes the current one."""
        self.shard = shard
        self._device = device
        self._add: Add = NcclAllReduce().add
        self.all_reduce: ChosenAllReduce | None = None
        """What :meth:`prepare` chose."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        self._nothing = torch.zeros(1, device=device)
        with shown_as_ours("the ranks can't connect to each other"):
            dist.init_process_group(
                "nccl",
                store=store,
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=STEP_SECONDS),
                device_id=device,
            )
        self.lowest(0)

    def prepare(self, hidden_size: int, dtype: torch.dtype) -> None:
        with shown_as_ours("the ranks can't try their all-reduce"):
            ways: list[AllReduce] = [NcclAllReduce(), *peer_all_reduces(self.shard, dtype, self._device)]
            self.all_reduce = choose(ways, hidden_size * dtype.itemsize, dtype, self._device)
        self._add = self.all_reduce.add

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        with shown_as_ours("all-reduce failed"):
            return self._add(residual, parts, norm, eps)

    def gather_columns(self, part: Tensor) -> Tensor:
        rows, columns = part.shape
        gathered = torch.empty((self.shard.size, rows, columns), dtype=part.dtype, device=part.device)
        with shown_as_ours("all-gather failed"):
            dist.all_gather_into_tensor(gathered, part.contiguous())
        return gathered.transpose(0, 1).reshape(rows, self.shard.size * columns)

    def meet(self) -> None:
        with shown_as_ours("the ranks can't meet"):
            dist.all_reduce(self._nothing)

    def lowest(self, number: int) -> int:
        value = torch.tensor(number, device=self._device)
        with shown_as_ours("all-reduce failed"):
            dist.all_reduce(value, dist.ReduceOp.MIN)
            return int(value)

    def close(self) -> None:
        """Leaves everything to the end of the process: NCCL would wait for the end of all CUDA graphs that use it."""


def peer_all_reduces(shard: Shard, dtype: torch.dtype, device: torch.device) -> list[KernelAllReduce]:
    """Those that need the peers' memory: none, and a line in the log, where the GPUs can't address each other's."""
    first = (device.index or 0) - shard.rank
    for one in range(first, first + shard.size):
        for other in range(first, first + shard.size):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                logger.warning("GPU %d can't address GPU %d's memory: all-reduce through NCCL alone", one, other)
                return []
    try:
        return _share_memory(shard, dtype, device)
    except Exception as error:  # all ranks have the same software and the same GPUs, so all of them come here
        logger.warning(
            "the ranks can't share memory, all-reduce through NCCL alone: %s: %s", type(error).__name__, error
        )
        return []


def _share_memory(shard: Shard, dtype: torch.dtype, device: torch.device) -> list[KernelAllReduce]:
    from splitserve.kernels import triton_all_reduce as kernels

    with_flags = kernels.buffer_bytes(CAPACITY_BYTES, shard.size)
    num_bytes = with_flags + kernels.flagless_bytes(FLAGLESS_CAPACITY_BYTES, shard.size)
    block = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    block[:with_flags].zero_()
    block[with_flags:].view(dtype).fill_(-0.0)
    handle = symmetric.rendezvous(block, dist.distributed_c10d._get_default_group())
    torch.cuda.synchronize(device)
    dist.barrier()  # from here on all of them are filled

    def part(first_byte: int, capacity_bytes: int) -> "PeerMemory":
        offset = block.data_ptr() - handle.buffer_ptrs[shard.rank] + first_byte
        return kernels.PeerMemory(
            rank=shard.rank,
            size=shard.size,
            capacity_bytes=capacity_bytes,
            buffers=torch.tensor([address + offset for address in handle.buffer_ptrs], device=device),
            calls=torch.zeros((2, kernels.PROGRAMS), dtype=torch.int32, device=device),
        )

    flagged, flagless = part(0, CAPACITY_BYTES), part(with_flags, FLAGLESS_CAPACITY_BYTES)
    ways = [("flagless", kernels.flagless_add, flagless), ("one-shot", kernels.one_shot_add, flagged)]
    if shard.size > 2:  # for two, it moves as much as one-shot, and meets twice
        ways.append(("two-shot", kernels.two_shot_add, flagged))
    return [
        KernelAllReduce(name, memory.capacity_bytes, _PeerKernel(kernel, memory, (block, handle)))
        for name, kernel, memory in ways
    ]


@dataclass(frozen=True, slots=True)
class _PeerKernel:
    """``mapping`` keeps the peers' memory mapped as long as this may be called."""

    kernel: Callable[["PeerMemory", Tensor, Tensor, int, Tensor | None, float], Tensor | None]
    memory: "PeerMemory"
    mapping: object

    def __call__(
        self, residual: Tensor, parts: Tensor, max_spins: int, norm: Tensor | None, eps: float
    ) -> Tensor | None:
        return self.kernel(self.memory, residual, parts, max_spins, norm, eps)
