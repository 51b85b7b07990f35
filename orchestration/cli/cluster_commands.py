"""``splitserve up | down | status | scale | drain | upgrade | logs``: the commands about running clusters."""

import argparse
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from splitserve import __version__
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.operate import add_operators_key_option
from splitserve.orchestration.cli.option_types import COUNT, whole_number
from splitserve.orchestration.cli.options import (
    HelpFormatter,
    add_run_options,
    add_spec_option,
    cluster_spec,
    errors_in_options,
)
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.model_source import is_model_id

EXIT_FAILED = 1
DEFAULT_NAME = "default"
WATCH_SECONDS = 2.0
CLEAR_SCREEN = "\x1b[2J\x1b[H"


def add_cluster_commands(commands: Any) -> None:
    """Add the commands to ``commands``, the result of :meth:`argparse.ArgumentParser.add_subparsers`."""
    up = commands.add_parser(
        "up",
        help="start a cluster that outlives this terminal",
        description="Start a cluster in the background, on this machine or on Ray; returns when it answers.",
        formatter_class=HelpFormatter,
    )
    up.add_argument(
        "--ray",
        default="",
        metavar="ADDRESS",
        help="address of a Ray cluster (HOST:PORT), auto, or local: start Ray here",
    )
    add_spec_option(up)
    add_run_options(up)
    up.set_defaults(run=_up)
    down = _add(commands, "down", "end a cluster and remove all its processes and files", _down)
    down.add_argument(
        "--forget",
        action="store_true",
        help="forget a cluster whose Ray cluster can't be reached any more, or whose record can't be read",
    )
    status = _add(commands, "status", "show a cluster's processes and load", _status)
    shown = status.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="for programs; without the load")
    shown.add_argument("--watch", action="store_true", help="show it again every two seconds, until Ctrl-C")
    add_operators_key_option(status)
    scale = _add(commands, "scale", "change the number of a pool's workers", _scale)
    scale.add_argument("pool", metavar="POOL")
    scale.add_argument("count", metavar="N", type=COUNT)
    drain = _add(commands, "drain", "let a worker finish its requests, then remove it for good", _drain)
    drain.add_argument("worker", metavar="WORKER")
    drain.add_argument("--force", action="store_true", help="also if it is the last worker of its role")
    upgrade = _add(commands, "upgrade", "replace all workers, one by one, without losing a request", _upgrade)
    upgrade.add_argument("--spec", default="", metavar="FILE", help="new spec; none: the same one, with new code")
    upgrade.add_argument(
        "--allow-gap", action="store_true", help="also if a pool's only worker must leave before its successor is ready"
    )
    for parser in (scale, drain, upgrade):
        parser.add_argument("--no-wait", action="store_true", help="return once the operation has begun")
    logs = _add(commands, "logs", "show what a cluster's processes have logged", _logs)
    logs.add_argument("worker", nargs="?", default="", metavar="PROCESS", help="router, launcher or a worker")
    logs.add_argument(
        "-n", "--lines", type=whole_number(0, 2**31), default=100, help="number of last lines of each process"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="print new lines until the cluster ends")


def _add(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--name", default="", help="name of the cluster; not needed if there is only one")
    parser.add_argument(
        "--ray", default="", metavar="ADDRESS", help="address of the Ray cluster; needed if `up` ran on another machine"
    )
    parser.set_defaults(run=run)
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def _up(options: argparse.Namespace) -> int:
    from splitserve.common.logs import FORMAT_VARIABLE, set_up_logging
    from splitserve.orchestration.cli.display import print_progress
    from splitserve.orchestration.cluster.detached import start_detached
    from splitserve.orchestration.control.state_folder import StateFolder
    from splitserve.orchestration.spec.start_checks import check_start

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end what was begun, as on Ctrl-C
    os.environ[FORMAT_VARIABLE] = options.log_format  # child processes inherit it
    set_up_logging("up", options.log_level)
    if options.api_key and options.ray:
        raise ConfigError("--api-key stays on this machine: give --api-key-file, a file on the router's node")
    spec = _at_home_anywhere(cluster_spec(options), on_ray=options.ray)
    folder = StateFolder(spec.name)
    if options.ray in ("", "local"):  # a cluster on other machines can't be checked from here
        with errors_in_options(options):
            check_start(spec)
    _say(f"splitserve {__version__}: {spec.served_model_name} on {spec.describe()}")
    if options.ray:
        from splitserve.orchestration.ray.commands import up_on_ray

        url = up_on_ray(spec, folder, options.ray, options.log_level, restart=options.restart)
    else:
        url = start_detached(spec, folder, options.log_level, restart=options.restart, show=print_progress)
    _say(f"Ready: {url}/v1 (model {spec.served_model_name}). `splitserve down --name {spec.name}` ends it.")
    return 0


def _at_home_anywhere(spec: ClusterSpec, *, on_ray: str) -> ClusterSpec:
    """Return ``spec`` with an absolute model path: the cluster may outlive this working directory.

    A model id stands for a directory of this machine's cache, or for one on each node of a Ray cluster.
    """
    from splitserve.orchestration.spec.hub import pinned, with_local_model

    if is_model_id(spec.model.path):
        return pinned(spec) if on_ray else with_local_model(spec)
    model = msgspec.structs.replace(spec.model, path=os.path.abspath(spec.model.path))
    return msgspec.structs.replace(spec, model=model)


def _client(options: argparse.Namespace, *, forget: bool = False) -> Any:
    """Return a client of the cluster that the options name. Raises :class:`ConfigError`, without ``forget`` also for a
    record that can't be read."""
    from splitserve.orchestration.cli.client import LocalClient
    from splitserve.orchestration.control.state_folder import choose_cluster

    if options.ray:
        from splitserve.orchestration.ray.commands import client_on_ray

        return client_on_ray(options.name or DEFAULT_NAME, options.ray)
    folder = choose_cluster(options.name)
    # A launcher on this machine is asked over its socket, which needs no record.
    record = folder.read_if_readable() if forget or folder.is_claimed() else folder.read()
    if record is not None and record.ray:
        from splitserve.orchestration.ray.commands import client_on_ray

        return client_on_ray(folder.name, record.ray)
    return LocalClient(folder)


def _down(options: argparse.Namespace) -> int:
    if not options.ray and _remove_failed_start(options.name):
        return 0
    _client(options, forget=options.forget).down(_say, forget=options.forget)
    return 0


def _remove_failed_start(name: str) -> bool:
    """Remove the logs that a failed start of a cluster called ``name`` has left; return whether there were any.

    An empty name means the default one if no cluster is known. Raises :class:`ConfigError` while the start goes on.
    """
    from splitserve.orchestration.control.state_folder import StateFolder, known_clusters, state_root

    if not name and not known_clusters():
        name = DEFAULT_NAME
    try:
        is_known = name in [entry.name for entry in state_root().iterdir()]
    except OSError:
        is_known = False
    folder = StateFolder(name)
    if not is_known or (folder.path / "lock").exists() or not folder.logs.is_dir():
        return False
    if starting := _launcher_with_log(folder.logs / "launcher.log"):
        raise ConfigError(f"{name} is starting (process {starting}): end its `splitserve up`, or try again later")
    folder.remove()
    _say(f"{name}: no cluster runs; removed the logs that a failed start has left in {folder.path}")
    return True


def _launcher_with_log(path: Path) -> int:
    """Return the process id of the launcher that logs to ``path``, but has not claimed its folder yet; 0: none."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if "splitserve.orchestration.cluster.detached" not in (process.info["cmdline"] or ()):
            continue
        with suppress(psutil.Error, OSError):
            if any(Path(file.path) == path.resolve() for file in process.open_files()):
                return int(process.pid)
    return 0


def _status(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.client import status_of
    from splitserve.orchestration.cli.display import describe_status
    from splitserve.orchestration.cli.load import load_of

    while True:
        status = status_of(_client(options))
        if options.json:
            _say(json.dumps(msgspec.to_builtins(status), indent=2))
            return 0
        text = describe_status(status)
        if status.url:
            text += f"\n{load_of(status.url, options.api_key_file)}"
        _say(f"{CLEAR_SCREEN}{text}" if options.watch else text)
        if not options.watch:
            return 0
        time.sleep(WATCH_SECONDS)


def _scale(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.client import follow, status_of
    from splitserve.orchestration.control.requests import Scale, accepted

    client = _client(options)
    before = status_of(client)
    if options.pool not in before.counts:
        raise ConfigError(f"there is no pool {options.pool!r}; the pools are {', '.join(before.counts)}")
    accepted(client.ask(Scale(options.pool, options.count)))
    if not options.no_wait:
        wanted = sum((before.counts | {options.pool: options.count}).values())
        follow(
            client,
            _say,
            lambda status: status.counts[options.pool] == options.count and status.is_settled,
            wanted,
            since=before,
        )
        _say(f"{options.pool} has {options.count} worker{'' if options.count == 1 else 's'}")
    return 0


def _drain(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.client import follow, status_of
    from splitserve.orchestration.control.requests import DrainWorker, accepted

    client = _client(options)
    before = status_of(client)
    accepted(client.ask(DrainWorker(options.worker, options.force)))
    if not options.no_wait:
        follow(
            client, _say, lambda status: all(each.name != options.worker for each in status.workers), 0, since=before
        )
        _say(f"{options.worker} has left")
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.client import LocalClient, follow, status_of
    from splitserve.orchestration.control.requests import UpgradeCluster, accepted

    spec: ClusterSpec | None = None
    if options.spec:
        from splitserve.orchestration.spec.document import read_spec

        spec = read_spec(options.spec)
    client = _client(options)
    if spec is not None:
        spec = _at_home_anywhere(spec, on_ray="" if isinstance(client, LocalClient) else "ray")
    client.bring_code()
    before = status_of(client)  # before there are successors
    accepted(client.ask(UpgradeCluster(None if spec is None else msgspec.to_builtins(spec), options.allow_gap)))
    for pool in () if spec is None else spec.pools:
        count = before.counts[pool.name]
        if pool.count != count:
            workers = "worker" if count == 1 else "workers"
            _say(f"  {pool.name:<10} keeps its {count} {workers}; `splitserve scale` changes the number")
    if options.no_wait:
        return 0
    status = follow(client, _say, lambda status: not status.is_upgrading, 0, since=before)
    assert status.upgrade is not None
    if status.upgrade.state is UpgradeState.FAILED:
        _say(
            f"the upgrade failed after {status.upgrade.num_replaced} of {status.upgrade.num_workers} workers and the "
            f"others stay as they are: {status.upgrade.problem}"
        )
        return EXIT_FAILED
    _say(f"{status.upgrade.num_replaced} workers replaced; they are of revision {status.revision} now")
    return 0


def _logs(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.client import log_lines

    for line in log_lines(_client(options), options.worker, options.lines, follow=options.follow):
        _say(line)
    return 0
