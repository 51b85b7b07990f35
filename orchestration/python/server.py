"""A cluster in this process's children, for programs: :func:`launch`.

It is the cluster of ``splitserve serve``: started, supervised and ended in the same way, with a random secret. Its
processes end with :meth:`Server.close`, with the ``with`` block, with the program, or when the program is killed.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from splitserve.common.errors import ConfigError
from splitserve.common.logs import LOG_LEVELS
from splitserve.orchestration.cli.display import describe_progress
from splitserve.orchestration.cluster.cluster import ignore_progress
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.python.batch import ClusterGoneError
from splitserve.orchestration.python.keywords import spec_of
from splitserve.orchestration.python.settings import Settings
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.expansion import resolve_secrets


def launch(
    model: str | os.PathLike[str] | None = None,
    *,
    spec: str | os.PathLike[str] | None = None,
    prefill: int = 0,
    decode: int = 0,
    mixed: int = 0,
    progress: bool | None = None,
    log_level: str = "warning",
    log_folder: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> "Server":
    """Start a cluster on this machine; return when it is ready.

    ``model``: a directory or a model id of the Hugging Face Hub; or ``spec``: the file of a cluster spec. ``prefill``,
    ``decode``, ``mixed``: numbers of workers, by default one mixed worker. ``settings``: options of ``splitserve
    serve``, with underscores; by default the port is a free one. ``progress`` shows the start on standard error; None:
    if that is a terminal. The processes log to standard error, or to files in ``log_folder``.

    Raises :class:`SplitserveError` for a setting that can't work and for a start that fails.
    """
    pools = {"prefill": prefill, "decode": decode, "mixed": mixed}
    return Server(spec_of(model, spec, pools, settings), progress=progress, log_level=log_level, log_folder=log_folder)


class Server:
    """A running cluster, from its creation to :meth:`close`; a context manager. See :func:`launch`."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        progress: bool | None = None,
        log_level: str = "warning",
        log_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {log_level!r}")
        self._spec = spec
        self._api_key = resolve_secrets(spec).api_key
        self._cluster = LocalCluster(
            spec,
            show=_show if wants_progress(progress) else ignore_progress,
            log_level=log_level,
            log_folder=_made(log_folder),
        )
        self._cluster.start()
        self._watcher = threading.Thread(target=self._cluster.watch, name="splitserve-watch", daemon=True)
        self._watcher.start()
        self._end: Callable[[], object] = weakref.finalize(self, _end, self._cluster, self._watcher, os.getpid())

    @property
    def url(self) -> str:
        """URL of the endpoint, like ``http://127.0.0.1:40123``."""
        return self._cluster.url

    @property
    def base_url(self) -> str:
        """URL that OpenAI's clients take as ``base_url``."""
        return f"{self.url}/v1"

    @property
    def model(self) -> str:
        """Model id that clients send."""
        return self._spec.served_model_name

    @property
    def api_key(self) -> str:
        """Key that the endpoint requires; "" for none."""
        return self._api_key

    @property
    def spec(self) -> ClusterSpec:
        """Spec of the cluster."""
        return self._spec

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name (``router``, ``prefill-0``, ...)."""
        return self._cluster.pids

    def check_alive(self) -> None:
        """Raise :class:`ClusterGoneError` if the cluster has ended, by :meth:`close` or by itself."""
        if not self._watcher.is_alive():
            raise ClusterGoneError(f"the cluster that served {self.model} has ended; its log may show why")

    def close(self) -> None:
        """End all processes; returns when they are gone. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()


def wants_progress(progress: bool | None) -> bool:
    """Return whether progress is shown; None: if standard error is a terminal."""
    return sys.stderr.isatty() if progress is None else progress


def _end(cluster: LocalCluster, watcher: threading.Thread, owner: int) -> None:
    """End a cluster. A process that was forked from its owner has no part in it."""
    if os.getpid() != owner:
        return
    try:
        cluster.request_stop("the server is closed")
        watcher.join()
    finally:
        cluster.stop()


def _show(event: ChildProgress) -> None:
    line = describe_progress(event)
    if line is not None:
        print(line, file=sys.stderr, flush=True)


def _made(folder: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder, which exists afterwards."""
    if folder is None:
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_folder: can't make {path}: {error.strerror or error}") from error
    return path
