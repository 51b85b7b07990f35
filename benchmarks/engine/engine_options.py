"""Options of benches that start a cluster of workers on one checkpoint, and the settings that they stand for."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from splitserve.benchmarks.common.arguments import not_negative
from splitserve.models.demo.checkpoint import SHAPES, write_demo_config, write_demo_model
from splitserve.orchestration.cli.option_types import bytes_option
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.engine_config import DEVICE_DEFAULTS

_SWITCHES = ("late_launch", "map_peer_memory", "keep_cores_awake", "second_token_at_prefill")


def add_engine_options(parser: argparse.ArgumentParser, *, shape: str, dtype: str, kv_memory: str) -> None:
    """Add the options, with the defaults of the bench; ``kv_memory`` "0": decide at start."""
    add = parser.add_argument
    add("--model", default="", help="a checkpoint; without it one of --shape is made")
    add("--shape", choices=sorted(SHAPES), default=shape)
    add("--dtype", default=dtype)
    add("--device", default="auto")
    add("--load-format", default="auto")
    add("--threads", type=not_negative, default=1, help="threads of each worker")
    add(
        "--kv-memory",
        type=bytes_option,
        default=kv_memory,
        metavar="SIZE",
        help="KV memory of each worker, like 512MiB; 0: decide at start",
    )
    add_switches(parser)


def add_switches(parser: argparse.ArgumentParser) -> None:
    """Add options of alternatives that can be compared; :func:`switches` reads them."""
    for name in _SWITCHES:
        default = getattr(EngineConfig(model=""), name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help="as of serve")


def add_max_num_seqs(parser: argparse.ArgumentParser) -> None:
    """Add the option; :func:`max_num_seqs` reads it."""
    parser.add_argument(
        "--max-num-seqs", type=not_negative, default=0, metavar="N", help="0: as of serve, 256 on a GPU, 64 on CPU"
    )


def max_num_seqs(options: argparse.Namespace) -> int:
    """Return the sequences that run at once in a worker: the option's, or those of ``--device``."""
    is_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return options.max_num_seqs or DEVICE_DEFAULTS["cuda" if is_gpu else "cpu"].max_num_seqs


def switches(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _SWITCHES}


def changed_switches(options: argparse.Namespace) -> dict[str, Any]:
    """Return those that aren't at their defaults."""
    defaults = EngineConfig(model="")
    return {name: value for name, value in switches(options).items() if value != getattr(defaults, name)}


@contextlib.contextmanager
def model_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the checkpoint of ``--model``, or one of ``--shape``, which is removed at the end."""
    if options.model:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as directory:
        write = write_demo_config if options.load_format == "dummy" else write_demo_model
        yield str(write(Path(directory) / options.shape, shape=options.shape))


def engine_config(options: argparse.Namespace, model: str, **changes: Any) -> EngineConfig:
    """Return the settings of :func:`add_engine_options` for ``model``, with ``changes``."""
    return EngineConfig(
        model=model,
        dtype=options.dtype,
        device=options.device,
        load_format=options.load_format,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory,
        **switches(options),
        **changes,
    )
