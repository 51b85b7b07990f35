"""Folder of a running cluster, from which the commands find it: one per cluster, accessible to its user alone.

    ROOT/NAME/lock           held by the cluster's launcher while it lives; free: the other files may be out of date
    ROOT/NAME/cluster.json   where the cluster runs (:class:`Record`)
    ROOT/NAME/control.sock   requests (see :mod:`.socket`)
    ROOT/NAME/logs/*.log     logs of a cluster without a terminal

ROOT is ``$SPLITSERVE_STATE_DIR``, else ``$XDG_STATE_HOME/splitserve``, else ``~/.local/state/splitserve``.
"""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from splitserve.common.errors import ConfigError

_ROOT_VARIABLE = "SPLITSERVE_STATE_DIR"
_RECORD = "cluster.json"
CLAIM_SECONDS = 0.2  # time after which a lock that is held is a launcher's, not a look of `is_claimed`


class NameTakenError(ConfigError):
    """Name that a cluster has already; ``place`` is where it runs, in words."""

    def __init__(self, name: str, place: str = "running already") -> None:
        super().__init__(
            f"a cluster called {name} is {place}: choose another --name, or end it first "
            f"(splitserve down --name {name})"
        )


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of a running cluster."""

    name: str
    launcher_pid: int = 0
    ray: str = ""  # address of the Ray cluster that it runs on; "" for a cluster on this machine
    head_pid: int = 0  # process id of the Ray head that was started for it; 0: none was
    head_start_seconds: float = 0.0  # start of that process (Unix time)
    head_folder: str = ""  # folder of that head


def state_root() -> Path:
    chosen = os.environ.get(_ROOT_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "splitserve"


class StateFolder:
    """Folder of one cluster. A launcher claims it; commands read it."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.path = (root or state_root()) / name
        self._lock_fd: int | None = None

    @property
    def socket(self) -> Path:
        return self.path / "control.sock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def claim(self) -> None:
        """Claim the folder for this process, until :meth:`remove` or the process's end.

        Raises :class:`ConfigError` if a cluster of that name is running or may be, or the folder can't be created.
        """
        deadline = time.monotonic() + CLAIM_SECONDS
        while self._lock_fd is None:
            lock_fd = self._open_lock()
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock_fd)
                if time.monotonic() > deadline:
                    raise NameTakenError(self.name) from None
                time.sleep(0.005)
                continue
            if self._is_lock(lock_fd):
                self._lock_fd = lock_fd
            else:  # the previous holder has just removed it
                os.close(lock_fd)
        try:
            record = self.read()
        except ConfigError:
            self.release()
            raise
        if record is not None and record.ray:
            self.release()
            raise NameTakenError(self.name, f"on Ray at {record.ray}")
        for left_over in (self.socket, self.path / _RECORD):
            left_over.unlink(missing_ok=True)

    def _open_lock(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            return os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.refusal(error) from error

    def refusal(self, error: OSError) -> ConfigError:
        """Return an error for people, after one of the folder's file system."""
        return ConfigError(
            f"can't keep the cluster's state in {self.path}: {error.strerror or error}; set {_ROOT_VARIABLE} to a "
            "folder that you may write to, on a disk with some space"
        )

    def _is_lock(self, lock_fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock_fd), (self.path / "lock").stat())
        except OSError:
            return False

    def is_claimed(self) -> bool:
        """Return whether the folder is claimed by a launcher that lives."""
        try:
            lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock_fd)
        return False

    def release(self) -> None:
        """Release the claim; files stay."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, record: Record) -> None:
        """Write the record atomically. Raises :class:`ConfigError` if that can't be done."""
        draft = self.path / f"{_RECORD}.new"
        try:
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(self.path / _RECORD)
        except OSError as error:
            raise self.refusal(error) from error

    def read(self) -> Record | None:
        """Return the record; None if there is none. Raises :class:`ConfigError` for one that can't be read: its cluster
        may be running on Ray."""
        path = self.path / _RECORD
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{path}, the record of cluster {self.name}, can't be read ({error}), and the cluster may run on Ray: "
                f"end it there (splitserve down --name {self.name} --ray ADDRESS), then remove the record "
                f"(splitserve down --name {self.name} --forget)"
            ) from None

    def read_if_readable(self) -> Record | None:
        """Return the record; None if there is none, or none that can be read."""
        try:
            return self.read()
        except ConfigError:
            return None

    def may_be_on_ray(self) -> bool:
        """Return whether the cluster runs on Ray, or may do so because its record can't be read."""
        try:
            record = self.read()
        except ConfigError:
            return True
        return record is not None and bool(record.ray)

    def discard(self) -> None:
        """Remove the claim and the record of a cluster that didn't start; only its logs stay."""
        if self._lock_fd is None:
            return
        for path in (self.socket, self.path / f"{_RECORD}.new", self.path / _RECORD, self.path / "lock"):
            path.unlink(missing_ok=True)
        self.release()

    def remove(self) -> None:
        """Remove the folder and the claim. Harmless if there is no folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()
        with suppress(OSError):  # not empty if there are other clusters
            self.path.parent.rmdir()


def known_clusters() -> list[StateFolder]:
    """Return all folders under the root, whether or not their clusters are running."""
    try:
        names = sorted(entry.name for entry in state_root().iterdir() if (entry / "lock").exists())
    except OSError:
        return []
    return [StateFolder(name) for name in names]


def choose_cluster(name: str) -> StateFolder:
    """Return the folder of the cluster that a command names, or of the only cluster if it names none.

    Raises :class:`ConfigError` that lists the names.
    """
    known = known_clusters()
    if name:
        chosen = [folder for folder in known if folder.name == name]
    else:
        chosen = [folder for folder in known if folder.is_claimed() or folder.may_be_on_ray()] or known
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(folder.name for folder in known)
    if not known:
        raise ConfigError(f"no cluster is known in {state_root()}: start one with splitserve up, or give --ray ADDRESS")
    raise ConfigError(
        f"there is no cluster called {name}; there are {names}"
        if name
        else f"there are several clusters: give --name, one of {names}"
    )
