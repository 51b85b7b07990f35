"""A worker's description of its machine and its limits, for its registration."""

import logging
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from splitserve import __version__
from splitserve.common.cores import available_cores, usable_cpus
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, pages_by_node, remote_bytes
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.messages.membership import WorkerSetup

logger = logging.getLogger(__name__)

_RDMA_DEVICES = Path("/sys/class/infiniband")


def setup_of(
    config: WorkerConfig, memory: KVMemory, host: HostMemory | None, kernels: Mapping[str, str]
) -> WorkerSetup:
    """Describe this process, whose KV memory and host tier (``host``) are allocated already. Logs the bytes of KV
    memory that are on the wrong NUMA node.

    ``kernels``: the backend of each operation.
    """
    on_host = memory.device.type == "cpu"
    remote = sum(_remote_bytes(group.bytes, config.affinity.numa_node) for group in memory.groups) if on_host else 0
    if remote:
        logger.warning(
            "%d of %d bytes of KV memory lie on other NUMA nodes than %s",
            remote,
            memory.num_bytes,
            config.affinity.numa_node,
        )
    memlock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WorkerSetup(
        machine=socket.gethostname(),
        version=__version__,
        device=str(memory.device),
        cpus=sorted(usable_cpus()),
        num_threads=config.engine.threads,
        remote_bytes=remote + (0 if host is None else host.num_remote_bytes),
        num_cores=available_cores(),
        kv_bytes=memory.num_bytes,
        host_kv_bytes=0 if host is None else len(host.bytes),
        memlock_bytes=None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        max_open_files=max(0, max_open_files),
        ucx_tls=os.environ.get("UCX_TLS", ""),
        kernels=dict(kernels),
        rdma_devices=sorted(entry.name for entry in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else [],
    )


def _remote_bytes(blocks: Tensor, numa_node: int | None) -> int:
    """Return the bytes of ``blocks`` on other NUMA nodes."""
    return remote_bytes(pages_by_node(blocks.data_ptr(), blocks.nbytes), blocks.nbytes, numa_node)
