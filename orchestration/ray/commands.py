"""``up`` on Ray, and the client of a cluster there: the parts of the commands around :mod:`.client`."""

import logging
from typing import Any

from splitserve.common.cores import available_cores
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.client import Say
from splitserve.orchestration.cli.display import print_progress
from splitserve.orchestration.control.state_folder import Record, StateFolder
from splitserve.orchestration.hosts.shared_memory import remove_abandoned
from splitserve.orchestration.ray.access import OPEN_TO_ANYBODY, accepts_strangers
from splitserve.orchestration.ray.client import RayClient, check_ray_is_installed, connect, disconnect, start_on_ray
from splitserve.orchestration.ray.head import RayHead, authenticate, has_started, is_running, start_head, stop_head
from splitserve.orchestration.ray.health import answer_of, ask_head
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

LOCAL = "local"

_log = logging.getLogger(__name__)


def up_on_ray(spec: ClusterSpec, folder: StateFolder, address: str, log_level: str, *, restart: bool) -> str:
    """Start the cluster on the Ray cluster at ``address``; returns its URL. Raises :class:`SplitserveError`."""
    check_ray_is_installed()
    folder.claim()
    heads: list[RayHead] = []

    def note(head: RayHead) -> None:
        heads.append(head)
        folder.write(
            Record(
                name=folder.name,
                ray=head.address,
                head_pid=head.pid,
                head_start_seconds=head.start_seconds,
                head_folder=head.folder,
            )
        )

    # The record in the folder comes first: `down` must find the remains of a driver that is killed from here on.
    try:
        if address == LOCAL:
            # Ray counts cores to reserve them; on one machine the workers share its cores.
            wanted = sum(pool.count * max(pool.threads, 1) for pool in spec.pools) + 1
            address = start_head(max(available_cores(), wanted), print, note).address
        connect(address, with_code=True)
        health = None
        if not heads:
            folder.write(Record(name=folder.name, ray=_gcs_address(address)))
            health = ask_head()
            _warn_if_open()
        url = start_on_ray(spec, address, log_level, restart=restart, show=print_progress)
        _warn_of_late_detection(health)
    except BaseException:
        try:
            for head in heads:
                disconnect()
                stop_head(head)
        finally:
            folder.remove()
        raise
    folder.release()
    return url


def client_on_ray(name: str, address: str) -> "RecordedClient":
    """Return a connected client. Raises :class:`ConfigError`."""
    folder = StateFolder(name)
    record = folder.read_if_readable()
    if record is not None and record.ray == address and record.head_folder:
        authenticate(record.head_folder)
    return RecordedClient(name, address, folder if record is not None and record.ray == address else None)


class RecordedClient(RayClient):
    """Client of a cluster on Ray, with the folder that `up` has created if it ran on this machine."""

    def __init__(self, name: str, address: str, folder: StateFolder | None) -> None:
        super().__init__(name, address)
        self._folder = folder

    def down(self, say: Say, *, forget: bool = False) -> None:
        record = None if self._folder is None else self._folder.read()
        head = _head_of(record)
        try:
            if head is None or (is_running(head) and has_started(head)):
                super().down(say)
        except ConfigError as error:
            if not forget and head is None:
                raise ConfigError(f"{error}; if that Ray cluster is gone for good: splitserve down --forget") from None
            say(f"{self._name}: {error}")
        if head is not None:
            disconnect()
            stop_head(head)
            remove_abandoned()
            say(f"{self._name}: the Ray head that was started for it has ended")
        if self._folder is not None:
            self._folder.remove()


def _head_of(record: Record | None) -> RayHead | None:
    if record is None or not record.head_pid:
        return None
    return RayHead(record.ray, record.head_pid, record.head_start_seconds, record.head_folder)


def _warn_if_open() -> None:
    """Warn if the Ray cluster that this process has joined accepts clients without credentials."""
    import ray

    address = str(ray.get_runtime_context().gcs_address)
    if accepts_strangers(address):
        _log.warning("%s", OPEN_TO_ANYBODY.format(address=address))


def _warn_of_late_detection(asked: Any) -> None:
    checks = answer_of(asked)
    if checks is not None and checks.advice():
        _log.warning("%s", checks.advice())


def _gcs_address(address: str) -> str:
    """Return the address for other commands: ``auto`` may mean another cluster for them."""
    import ray

    return str(ray.get_runtime_context().gcs_address) if address == "auto" else address
