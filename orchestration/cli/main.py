"""The command line: ``splitserve serve | up | status | ... | spec | demo | demo-model | bench | tune | version``.

Only the standard library and the shared config are imported here; a command imports what it needs when it
runs, so that ``--help`` is instant. An error that the user can mend is one line on standard error and exit status 2.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from splitserve import __version__
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.common.logs import LOG_LEVELS, set_up_logging
from splitserve.orchestration.cli.cluster_commands import add_cluster_commands
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.option_types import path, positive_bytes, whole_number
from splitserve.orchestration.cli.options import (
    HelpFormatter,
    add_run_options,
    add_spec_option,
    cluster_spec,
    errors_in_options,
)
from splitserve.orchestration.lmcache.command import add_lmcache_command
from splitserve.orchestration.spec.sizes import format_bytes

BENCHES = {
    "serve": ("splitserve.benchmarks.serving.serve", "load on any OpenAI completions endpoint"),
    "handover": ("splitserve.benchmarks.kv.handover", "KV hand-over against a plain memory copy"),
    "latency": ("splitserve.benchmarks.serving.latency", "TTFT and second token of 1P1D against a mixed worker"),
    "isolation": (
        "splitserve.benchmarks.serving.isolation",
        "gaps between tokens while prompts of others arrive, P/D or mixed",
    ),
    "attacks": (
        "splitserve.benchmarks.attacks.bench",
        "hostile HTTP clients beside a stream: its gaps, the router's memory",
    ),
    "router": ("splitserve.benchmarks.router.overhead", "what the router adds to a worker that answers at once"),
    "chaos": (
        "splitserve.benchmarks.chaos.chaos",
        "kills, freezes and drains under load: right tokens, nothing left over",
    ),
    "engine-loop": (
        "splitserve.benchmarks.engine.engine_loop",
        "what the host adds to a GPU's steps, with a clock for a GPU",
    ),
    "awake-cores": (
        "splitserve.benchmarks.engine.awake_cores",
        "what keeping cores awake does here: wake-ups, hold-ups",
    ),
    "kernels": ("splitserve.benchmarks.kernels.kernels", "each operation on each backend, at the shapes of a model"),
    "layout": ("splitserve.benchmarks.kernels.layout", "what the order inside a KV block costs attention"),
    "cluster": (
        "splitserve.benchmarks.cluster.cluster",
        "several machines on Ray: start, death, arrival, scaling, upgrade",
    ),
    "up": ("splitserve.benchmarks.cluster.up_times", "from one command to a cluster that answers, locally and on Ray"),
    "engine": (
        "splitserve.benchmarks.engine.engine",
        "decode steps and prefills of a GPU, as shares of what it can do",
    ),
    "all-reduce": ("splitserve.benchmarks.kernels.all_reduce", "each way of adding up a tensor over GPUs, by size"),
    "tensor-parallel": (
        "splitserve.benchmarks.engine.tensor_parallel",
        "decode steps of several ranks against those of one",
    ),
    "tiers": ("splitserve.benchmarks.kv.tiers", "chats with and without a host tier, and prompts that share nothing"),
    "tier-copies": ("splitserve.benchmarks.kv.tier_copies", "KV blocks to and from host memory, against a plain copy"),
    "soak": (
        "splitserve.benchmarks.serving.soak",
        "resident memory of each process under many requests of random lengths",
    ),
    "tier-soak": ("splitserve.benchmarks.kv.tier_soak", "requests on tiers far too small, and damaged: right tokens"),
    "engine-cpu": ("splitserve.benchmarks.engine.engine_vs_transformers", "the engine on CPU against transformers"),
}
TUNE = ("splitserve.benchmarks.kernels.tune", "find the fastest launch parameters of kernels on this GPU")
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHES:
            return _main_of(BENCHES[arguments[1]][0], arguments[2:])  # its options are its module's own
        if arguments[:1] == ["tune"]:
            return _main_of(TUNE[0], arguments[1:])
        options = build_parser().parse_args(arguments)
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads our output has enough of it, like head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at its end
        return EXIT_BROKEN_PIPE
    except SplitserveError as error:
        print(f"splitserve: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("splitserve: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="splitserve", description="Serve large language models with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"splitserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    add_cluster_commands(commands)
    add_lmcache_command(commands)
    _add_doctor(commands)
    _add_spec_commands(commands)
    _add_demo(commands)
    _add_demo_model(commands)
    bench = commands.add_parser("bench", help="measure: " + ", ".join(BENCHES))
    names = bench.add_subparsers(required=True, metavar="BENCH")
    for name, (_, help_text) in BENCHES.items():
        names.add_parser(name, help=help_text)
    commands.add_parser("tune", help=TUNE[1])
    version = commands.add_parser("version", help="show the version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a Hugging Face checkpoint behind an OpenAI-compatible endpoint",
        description="Serve a checkpoint: --prefill P --decode D for disaggregation, --mixed N without; or --spec FILE.",
        formatter_class=HelpFormatter,
    )
    add_spec_option(parser)
    add_run_options(parser)
    parser.set_defaults(run=_serve)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="show the whole path once: a small checkpoint, 1 prefill + 1 decode worker, a streamed chat",
        description="Serve a small checkpoint disaggregated, send one streamed chat request, show what happened.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", default="", metavar="PATH", help="take this checkpoint; empty: build one")
    parser.add_argument("--prompt", default="", help="what to say; empty: a text of a few KV blocks")
    parser.add_argument("--max-tokens", type=whole_number(1, 4096), default=48, help="length of the answer")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="of every process")
    parser.set_defaults(run=_demo)


def _add_demo_model(commands: Any) -> None:
    parser = commands.add_parser(
        "demo-model", help="write a random Hugging Face checkpoint, the same each time", formatter_class=HelpFormatter
    )
    parser.add_argument("directory", type=path, metavar="DIR", help="made if needed; a checkpoint in it is replaced")
    parser.add_argument("--shape", default="tiny", help="tiny, or the true shape of qwen3-0.6b, llama-3.2-1b, ...")
    parser.add_argument("--architecture", choices=("qwen3", "llama"), help="the shape's own by default")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the shape's own"
    )
    parser.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, help="of the weights")
    parser.add_argument("--max-shard-size", type=positive_bytes, default="5GB", metavar="SIZE", help="of each file")
    parser.set_defaults(run=_demo_model)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is wrong with this machine or with a running cluster, and what to do",
        description="Look at this machine, at what serving PATH here would run into, or --against a running cluster; "
        "then send a request through the real path. Exit status: 0 nothing is wrong, 1 something is, 2 it couldn't "
        "look.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--against", default="", metavar="URL", help="look at the cluster with this endpoint")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=True, help="send a request through the real path"
    )
    parser.add_argument(
        "--transport", default="", metavar="NAME", help="by which KV is to travel, like tcp; empty: the best there is"
    )
    add_spec_option(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="error", help="of this command")
    parser.set_defaults(run=_doctor)


def _add_spec_commands(commands: Any) -> None:
    """``commands``: those of ``splitserve``; the ones added here are below ``spec``."""
    parser = commands.add_parser("spec", help="check, show or describe cluster specs (YAML)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="say what is wrong with a spec, and where")
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--document-only",
        action="store_true",
        help="leave out the files and variables that it refers to on this machine",
    )
    check.set_defaults(run=_spec_check)
    show = commands.add_parser("show", help="print the spec that options of `serve` stand for")
    add_spec_option(show)
    show.set_defaults(run=_spec_show)
    schema = commands.add_parser("schema", help="print the JSON schema of specs, for editors")
    schema.set_defaults(run=_spec_schema)


def _spec_check(options: argparse.Namespace) -> int:
    from splitserve.orchestration.spec.document import read_spec
    from splitserve.orchestration.spec.start_checks import file_problems

    spec = read_spec(options.file, None if options.document_only else file_problems)
    print(f"{options.file}: {spec.served_model_name} on {spec.describe()}: nothing is wrong with it")
    return 0


def _spec_show(options: argparse.Namespace) -> int:
    from splitserve.orchestration.spec.document import to_yaml

    print(to_yaml(cluster_spec(options)), end="")
    return 0


def _spec_schema(_options: argparse.Namespace) -> int:
    from splitserve.orchestration.spec.document import schema_text

    print(schema_text(), end="")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.serve import serve
    from splitserve.orchestration.spec.start_checks import check_start

    set_up_logging("launcher", options.log_level)
    spec = cluster_spec(options)
    with errors_in_options(options):
        check_start(spec)
    return serve(spec, options.log_level, restart=options.restart)


def _doctor(options: argparse.Namespace) -> int:
    if options.transport and not (options.probe or options.against):
        raise ConfigError("--transport is about the probe, or a cluster --against: leave it or --no-probe away")
    if options.against and (options.model or options.spec):
        raise ConfigError("--against asks a running cluster what it serves: leave PATH and --spec away")
    if not options.json:  # before anything that takes time: imports, PyTorch, a cluster that is asked
        print(f"splitserve {__version__}: looking at {options.against or 'this machine'}", flush=True)
    from splitserve.orchestration.doctor.command import run_doctor

    set_up_logging("doctor", options.log_level)
    return run_doctor(options)


def _demo(options: argparse.Namespace) -> int:
    from splitserve.orchestration.cli.demo import run_demo

    set_up_logging("launcher", options.log_level)
    return run_demo(options.model, options.prompt, options.max_tokens, options.log_level)


def _demo_model(options: argparse.Namespace) -> int:
    from splitserve.models.demo.checkpoint import write_demo_model

    try:
        written = write_demo_model(
            options.directory,
            shape=options.shape,
            architecture=options.architecture,
            seed=options.seed,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size,
        )
    except OSError as error:
        raise ConfigError(f"can't write a checkpoint to {options.directory}: {error.strerror or error}") from error
    size = sum(file.stat().st_size for file in written.iterdir())
    print(f"{written}: {format_bytes(size)} in {sum(1 for _ in written.iterdir())} files")
    return 0


def _main_of(module: str, arguments: list[str]) -> int:
    """SIGTERM ends it in order, as Ctrl-C does: a worker that a bench has frozen would be left for ever."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status: int = importlib.import_module(module).main(arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status


def _version(_options: argparse.Namespace) -> int:
    print(f"splitserve {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
