"""The collectives of ranks on GPUs of one machine: NCCL, and kernels that reach into the peers' memory.

No operation uses NVLink's multicast (NVLS): it is switched off unless the user's environment says otherwise, since it
takes memory and a working fabric manager, and gains nothing at the sizes of a step.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C._distributed_c10d import Store

from splitserve.models.parallel.all_reduce import (
    CAPACITY_BYTES,
    FLAGLESS_CAPACITY_BYTES,
    TRIAL_SPINS,
    Add,
    AllReduce,
    ChosenAllReduce,
    KernelAllReduce,
    NcclAllReduce,
    choose,
)
from splitserve.models.parallel.ranks import shown_as_ours
from splitserve.models.weights.shard import Shard

if TYPE_CHECKING:
    from splitserve.kernels.triton.peer_memory import PeerMemory

logger = logging.getLogger(__name__)

STEP_SECONDS = 600.0
GATHER_CAPACITY_BYTES = 32 << 20  # 128 rows of a vocabulary of 128k in two bytes each
_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",  # ranks are processes of one machine
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


class CudaCollectives:
    """See :class:`splitserve.models.parallel.ranks.Collectives`. Works in the current stream, and can be captured."""

    def __init__(self, store: Store, shard: Shard, device: torch.device) -> None:
        """Waits for all ranks. ``device`` becomes the current one."""
        self.shard = shard
        self._device = device
        self._add: Add = NcclAllReduce().add
        self._gather: _PeerGather | None = None
        self.all_reduce: ChosenAllReduce | None = None
        """The choice of :meth:`prepare`; None before it."""
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
            through_peers = _peer_ways(self.shard, dtype, self._device)
            ways: list[AllReduce] = [NcclAllReduce(), *through_peers.all_reduces]
            self.all_reduce = choose(ways, hidden_size * dtype.itemsize, dtype, self._device)
            gather = through_peers.gather
            self._gather = gather if gather is not None and gather.works(dtype) else None
        self._add = self.all_reduce.add

    def add_reduced(
        self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor | None:
        with shown_as_ours("all-reduce failed"):
            return self._add(residual, parts, norm, eps)

    def gather_columns(self, part: Tensor) -> Tensor:
        if self._gather is not None and self._gather.can_take(part):
            return self._gather(part)
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


@dataclass(frozen=True, slots=True)
class _PeerWays:
    """The collectives that work through the peers' memory. ``gather``: of columns, None where it doesn't work."""

    all_reduces: Sequence[KernelAllReduce] = ()
    gather: "_PeerGather | None" = None


def _peer_ways(shard: Shard, dtype: torch.dtype, device: torch.device) -> _PeerWays:
    """Nothing where the GPUs can't address each other's memory, and a line in the log."""
    first = (device.index or 0) - shard.rank
    for one in range(first, first + shard.size):
        for other in range(first, first + shard.size):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                logger.warning("GPU %d can't address GPU %d's memory: the ranks use NCCL alone", one, other)
                return _PeerWays()
    try:
        return _share_memory(shard, dtype, device)
    except Exception as error:  # all ranks have the same software and the same GPUs, so all of them come here
        logger.warning("the ranks can't share memory, and use NCCL alone: %s: %s", type(error).__name__, error)
        return _PeerWays()


def _share_memory(shard: Shard, dtype: torch.dtype, device: torch.device) -> _PeerWays:
    from splitserve.kernels.triton import all_gather as gathering
    from splitserve.kernels.triton import all_reduce as kernels
    from splitserve.kernels.triton.peer_memory import PeerMemory

    flagged_bytes = kernels.buffer_bytes(CAPACITY_BYTES, shard.size)
    flagless_bytes = kernels.flagless_bytes(FLAGLESS_CAPACITY_BYTES, shard.size)
    gather_at = flagged_bytes + flagless_bytes
    num_bytes = gather_at + gathering.gather_bytes(GATHER_CAPACITY_BYTES)
    block = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    block.zero_()
    block[flagged_bytes:gather_at].view(dtype).fill_(-0.0)
    handle = symmetric.rendezvous(block, dist.distributed_c10d._get_default_group())
    torch.cuda.synchronize(device)
    dist.barrier()  # from here on all of them are filled

    def part(first_byte: int, capacity_bytes: int, num_programs: int) -> "PeerMemory":
        offset = block.data_ptr() - handle.buffer_ptrs[shard.rank] + first_byte
        return PeerMemory(
            rank=shard.rank,
            size=shard.size,
            capacity_bytes=capacity_bytes,
            buffers=torch.tensor([address + offset for address in handle.buffer_ptrs], device=device),
            calls=torch.zeros((2, num_programs), dtype=torch.int32, device=device),
        )

    flagged = part(0, CAPACITY_BYTES, kernels.PROGRAMS)
    flagless = part(flagged_bytes, FLAGLESS_CAPACITY_BYTES, kernels.PROGRAMS)
    ways = [("flagless", kernels.flagless_add, flagless), ("one-shot", kernels.one_shot_add, flagged)]
    if shard.size > 2:  # for two, it moves as much as one-shot, and meets twice
        ways.append(("two-shot", kernels.two_shot_add, flagged))
    mapping = (block, handle)
    gather = part(gather_at, GATHER_CAPACITY_BYTES, gathering.PROGRAMS)
    return _PeerWays(
        [
            KernelAllReduce(name, memory.capacity_bytes, _PeerKernel(kernel, memory, mapping))
            for name, kernel, memory in ways
        ],
        _PeerGather(gather, block[gather_at:], mapping),
    )


@dataclass(frozen=True, slots=True)
class _PeerGather:
    """``mine``: this rank's own buffer. ``mapping`` keeps the peers' memory mapped as long as this may be called."""

    memory: "PeerMemory"
    mine: Tensor
    mapping: object

    def can_take(self, part: Tensor) -> bool:
        return self.memory.size * part.nbytes <= self.memory.capacity_bytes

    def __call__(self, part: Tensor, max_spins: int = 0) -> Tensor:
        from splitserve.kernels.triton.all_gather import gather_columns

        return gather_columns(self.memory, self.mine, part.contiguous(), max_spins)

    def works(self, dtype: torch.dtype) -> bool:
        """Return whether all ranks get the right columns, several times in a row. All ranks call it together."""
        ok, why, device = 1, "wrong columns", self.mine.device
        try:
            for rows, columns in ((1, 16), (9, 4112), (3, 24)) * 2:
                wanted = torch.arange(rows * columns * self.memory.size, device=device).remainder(251).to(dtype)
                wanted = wanted.view(rows, self.memory.size, columns)
                gathered = self(wanted[:, self.memory.rank], TRIAL_SPINS)
                ok &= int(torch.equal(gathered, wanted.flatten(1)))
        except Exception as error:  # whatever it is: NCCL is there
            ok, why = 0, f"{type(error).__name__}: {error}"
        agreed = torch.tensor(ok, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        if not int(agreed):
            logger.warning("columns are gathered through NCCL: %s", why if not ok else "it failed on another rank")
        return bool(agreed)


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
