"""``splitserve lmcache``: LMCache's server in the foreground, and its environment."""

import argparse
from typing import Any

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.common.logs import LOG_LEVELS, set_up_logging
from splitserve.orchestration.cli.options import HelpFormatter, add_options_of
from splitserve.protocol.config import LMCacheConfig

DEFAULT_PORT = 5555  # LMCache's own


def add_lmcache_command(commands: Any) -> None:
    parser = commands.add_parser(
        "lmcache",
        help="run an LMCache server for the workers of this machine, which use it with `--lmcache ENDPOINT`",
        description="Start LMCache's multiprocess server in an environment of its own, and start it again when it ends "
        "or hangs. A cluster spec with a part `lmcache` does the same by itself.",
        formatter_class=HelpFormatter,
    )
    add_options_of("lmcache", parser)
    parser.set_defaults(port=DEFAULT_PORT)
    parser.add_argument("--install", action="store_true", help="create that environment and exit")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.install:
        from splitserve.orchestration.lmcache.environment import install

        print(f"LMCache's environment is {install(options.environment)}")
        return 0
    from splitserve.orchestration.lmcache.server import run_lmcache

    set_up_logging("lmcache", options.log_level)
    for backend in options.backend:
        _check_backend(backend)
    config = LMCacheConfig(
        memory_bytes=options.memory,
        chunk_tokens=options.chunk_tokens,
        port=options.port,
        backends=tuple(options.backend),
        environment=options.environment,
    )
    run_lmcache(config, _show)
    return 0


def _check_backend(backend: str) -> None:
    try:
        described = msgspec.json.decode(backend, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--backend {backend}: {error}") from error
    if not isinstance(described.get("type"), str):
        raise ConfigError(f"--backend {backend} has no type; LMCache supports fs (files), resp (Redis) and others")


def _show(stage: str, detail: dict[str, str]) -> None:
    if stage == "ready":
        print(f"Ready: {detail['endpoint']}. Ctrl-C ends it.", flush=True)
