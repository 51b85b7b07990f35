"""Processes on this machine: children of this process, with a share of its cores and GPUs of their own."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from splitserve.orchestration.addresses import LOOPBACK, own_address
from splitserve.orchestration.cores import available_cores, split_cores
from splitserve.orchestration.expansion import (
    RouterPorts,
    Secrets,
    resolve_secrets,
    router_config,
    worker_config,
    worker_environment,
)
from splitserve.orchestration.gpus import VISIBLE, GpuAssignment, check_enough_gpus, device_of, list_gpus
from splitserve.orchestration.host import Event, Memory
from splitserve.orchestration.process import ChildProcess
from splitserve.orchestration.shared_memory import remove_abandoned
from splitserve.orchestration.spec import ClusterSpec, PoolSpec
from splitserve.security import check_exposure


@dataclass(frozen=True)
class Entries:
    """What the processes run, as ``module:function`` (see :class:`splitserve.orchestration.child.Order`)."""

    router: str = "splitserve.router.server:run_router"
    worker: str = "splitserve.decode.entry:run_worker"


ENTRIES = Entries()


class LocalHost:
    """See :class:`splitserve.orchestration.host.Host`. Call it from one thread.

    ``environment`` is added to the children's own. With a ``log_folder`` each process logs to a file there.
    """

    def __init__(
        self,
        *,
        log_level: str = "info",
        entries: Entries = ENTRIES,
        num_cores: int | None = None,
        environment: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
    ) -> None:
        self._log_level = log_level
        self._entries = entries
        self._num_cores = available_cores() if num_cores is None else num_cores
        self._environment = dict(environment or {})
        self._log_folder = log_folder
        self._secrets = Secrets()
        self._address = LOOPBACK
        self._gpus = GpuAssignment([])
        self._names: dict[str, None] = {}  # of running workers, in the order of their starts
        self._threads: dict[str, int] = {}  # a worker that is started again has as many as before

    def prepare(self, spec: ClusterSpec) -> None:
        remove_abandoned()
        self._secrets = resolve_secrets(spec)
        self._address = own_address(spec.network, LOOPBACK)
        check_exposure(self._address, self._secrets.secret)
        gpus = list_gpus({**os.environ, **self._environment})
        check_enough_gpus(spec, gpus)
        self._gpus = GpuAssignment(gpus, spec.devices.share)

    def start_router(self, spec: ClusterSpec, ports: RouterPorts, emit: Callable[[Event], None]) -> ChildProcess:
        return ChildProcess(
            name="router",
            entry=self._entries.router,
            config=router_config(spec, self._secrets, self._address, ports),
            threads=0,
            log_level=self._log_level,
            emit=emit,
            environment=self._environment,
            log_file=self._log_file("router"),
        )

    def start_worker(
        self, name: str, spec: ClusterSpec, pool: PoolSpec, membership: str, emit: Callable[[Event], None]
    ) -> ChildProcess:
        environment = worker_environment(spec, pool)
        place = ""
        if self._needs_gpus(pool):
            gpus = self._gpus.take(name, pool.tensor_parallel_size)
            environment[VISIBLE] = ",".join(gpu.uuid for gpu in gpus)
            place = "GPU " + ",".join(str(gpu.index) for gpu in gpus)
        self._names[name] = None
        config = worker_config(
            spec,
            pool,
            name,
            self._secrets,
            membership=membership,
            host=self._address,
            threads=pool.threads or self._share_of_cores(spec, name),
        )
        try:
            return ChildProcess(
                name=name,
                entry=self._entries.worker,
                config=config,
                threads=config.engine.threads,
                log_level=self._log_level,
                emit=emit,
                environment={**environment, **self._environment},
                place=place,
                log_file=self._log_file(name),
            )
        except OSError:
            self.release(name)
            raise

    def has_room(self, pool: PoolSpec) -> bool:
        return not self._needs_gpus(pool) or self._gpus.num_free() >= pool.tensor_parallel_size

    def release(self, name: str) -> None:
        self._gpus.give_back(name)
        self._names.pop(name, None)

    def remember(self, memory: Memory) -> None:
        """Nobody goes on in place of a launcher on this machine: its children end with it."""

    def close(self) -> None:
        """Nothing is left to close: children are the launcher's."""

    def _needs_gpus(self, pool: PoolSpec) -> bool:
        return device_of(pool.device, self._gpus.gpus) == "cuda"

    def _share_of_cores(self, spec: ClusterSpec, name: str) -> int:
        """An even share, for as many workers as the spec counts, or as there are."""
        shares = split_cores(self._num_cores, max(spec.num_workers, len(self._names)))
        return self._threads.setdefault(name, shares[list(self._names).index(name)])

    def _log_file(self, name: str) -> Path | None:
        return None if self._log_folder is None else self._log_folder / f"{name}.log"
