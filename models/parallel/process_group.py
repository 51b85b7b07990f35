"""The collectives of ranks that are processes of one machine, over torch.distributed: gloo on CPU. For GPUs see
:mod:`.cuda_group`.

Ranks meet at a store that rank 0 opens. The store, and all sockets that the ranks open later, are bound to the loopback
address: the ranks are processes of one machine, and other machines need no access.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from splitserve.kernels.reference.operations import join_parts
from splitserve.models.parallel.ranks import Collectives, shown_as_ours
from splitserve.models.weights.shard import Shard

LOOPBACK = "127.0.0.1"
MEETING_SECONDS = 300.0  # for all ranks to arrive: they import, and read their config
STEP_SECONDS = 600.0  # a rank that is gone shows at once; this one is for those that hang


def open_store(size: int) -> tuple[TCPStore, int]:
    """Rank 0's side of the meeting, and its port. ``size`` ranks will come."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(size)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            LOOPBACK,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=MEETING_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # else it would listen on every address of the machine
        )
    return store, port


def find_store(port: int, size: int) -> TCPStore:
    """Connect to the store that rank 0 has opened. Raises :class:`CollectiveError` if none is there."""
    with shown_as_ours("can't reach rank 0"):
        return TCPStore(LOOPBACK, port, size, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))


class GlooCollectives:
    """Over TCP on the loopback address. See :class:`splitserve.models.parallel.ranks.Collectives`."""

    def __init__(self, store: Store, shard: Shard) -> None:
        """Waits for all ranks."""
        self.shard = shard
        self._nothing = torch.zeros(1)
        gloo: Any = dist.ProcessGroupGloo  # its stubs are incomplete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=STEP_SECONDS)
        with shown_as_ours("the ranks can't connect to each other"):
            self._group = gloo(store, shard.rank, shard.size, options)
        self.lowest(0)  # connections are made on first use: make them now

    def prepare(self, hidden_size: int, dtype: torch.dtype) -> None: ...

    def add_reduced(self, residual: Tensor, parts: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> None:  # noqa: ARG002
        partial = join_parts(parts, residual.dtype)
        with shown_as_ours("all-reduce failed"):
            self._group.allreduce([partial]).wait()
        residual.add_(partial)

    def gather_columns(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.shard.size)]
        with shown_as_ours("all-gather failed"):
            self._group.allgather([parts], [part]).wait()
        return torch.cat(parts, dim=1)

    def meet(self) -> None:
        with shown_as_ours("the ranks can't meet"):
            self._group.allreduce([self._nothing]).wait()

    def lowest(self, number: int) -> int:
        value = torch.tensor([number])
        with shown_as_ours("all-reduce failed"):
            self._group.allreduce([value], dist.ReduceOp.MIN).wait()
        return int(value)

    def close(self) -> None:
        with shown_as_ours("shutdown failed"):
            self._group.shutdown()


def join_group(store: Store, shard: Shard, device: torch.device) -> Collectives:
    """The collectives for models on ``device``. Waits for all ranks; raises :class:`CollectiveError`."""
    if device.type == "cpu":
        return GlooCollectives(store, shard)
    from splitserve.models.parallel.cuda_group import CudaCollectives

    return CudaCollectives(store, shard, device)
