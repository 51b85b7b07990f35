"""``up`` on Ray, and the client of a cluster there: what the commands do around :mod:`.ray_client`."""

from splitserve.errors import ConfigError
from splitserve.orchestration.client import Say
from splitserve.orchestration.cores import available_cores
from splitserve.orchestration.display import print_progress
from splitserve.orchestration.ray_client import RayClient, connect, start_on_ray
from splitserve.orchestration.ray_head import RayHead, authenticate, start_head, stop_head
from splitserve.orchestration.spec import ClusterSpec
from splitserve.orchestration.state_folder import Record, StateFolder

LOCAL = "local"


def up_on_ray(spec: ClusterSpec, folder: StateFolder, address: str, log_level: str, *, restart: bool) -> str:
    """Start the cluster on the Ray cluster at ``address``; returns its URL. Raises :class:`SplitserveError`."""
    folder.claim()
    head: RayHead | None = None
    try:
        if address == LOCAL:
            # Ray counts cores to reserve them; on one machine the workers share what there is.
            wanted = sum(pool.count * max(pool.threads, 1) for pool in spec.pools) + 1
            head = start_head(max(available_cores(), wanted), print)
            address = head.address
        connect(address, with_code=True)
        record = Record(name=folder.name, ray=_gcs_address(address))
        if head is not None:
            record = Record(
                name=folder.name,
                ray=address,
                head_pid=head.pid,
                head_start_seconds=head.start_seconds,
                head_folder=head.folder,
            )
        folder.write(record)  # first: `down` must find what a driver leaves that is killed now
        url = start_on_ray(spec, address, log_level, restart=restart, show=print_progress)
    except BaseException:
        if head is not None:
            stop_head(head)
        folder.remove()
        raise
    folder.release()
    return url


def client_on_ray(name: str, address: str) -> "RecordedClient":
    """A client that is connected. Raises :class:`ConfigError`."""
    folder = StateFolder(name)
    record = folder.read()
    if record is not None and record.ray == address and record.head_folder:
        authenticate(record.head_folder)
    return RecordedClient(name, address, folder if record is not None and record.ray == address else None)


class RecordedClient(RayClient):
    """With the folder that `up` has made on this machine, if this is the one where it ran."""

    def __init__(self, name: str, address: str, folder: StateFolder | None) -> None:
        super().__init__(name, address)
        self._folder = folder

    def down(self, say: Say, *, forget: bool = False) -> None:
        record = None if self._folder is None else self._folder.read()
        try:
            super().down(say)
        except ConfigError as error:
            if not forget and (record is None or not record.head_pid):
                raise ConfigError(f"{error}; if that Ray cluster is gone for good: splitserve down --forget") from None
            say(f"{self._name}: {error}")
        if record is not None and record.head_pid:
            stop_head(RayHead(record.ray, record.head_pid, record.head_start_seconds, record.head_folder))
            say(f"{self._name}: the Ray head that was started for it has ended")
        if self._folder is not None:
            self._folder.remove()


def _gcs_address(address: str) -> str:
    """As other commands shall find it: ``auto`` may mean something else for them."""
    import ray

    return str(ray.get_runtime_context().gcs_address) if address == "auto" else address
