"""The command line: ``splitserve serve | up | status | ... | spec | demo | demo-model | bench | tune | version``.

Only the standard library and the shared config are imported here; a command imports what it needs when it runs, so that
``--help`` is instant. An error that the user can correct is one line on standard error and exit status 2.
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
from splitserve.common.logs import FORMAT_VARIABLE, LOG_LEVELS, set_up_logging
from splitserve.orchestration.cli.cluster_commands import add_cluster_commands
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cli.models import add_models_command
from splitserve.orchestration.cli.operate import add_operation_commands
from splitserve.orchestration.cli.option_types import path, positive_bytes, whole_number
from splitserve.orchestration.cli.options import (
    HelpFormatter,
    add_run_options,
    add_spec_option,
    cluster_spec,
    errors_in_options,
)
from splitserve.orchestration.cli.top import add_top_command
from splitserve.orchestration.cli.trace import add_trace_command
from splitserve.orchestration.lmcache.command import add_lmcache_command
from splitserve.orchestration.spec.sizes import format_bytes

BENCHES = {
    "serve": ("splitserve.benchmarks.serving.serve", "load on any OpenAI completions endpoint"),
    "handover": ("splitserve.benchmarks.kv.handover", "KV hand-over against a plain memory copy"),
    "goodput": ("splitserve.benchmarks.goodput.bench", "does disaggregation pay here? goodput at equal devices"),
    "twin": ("splitserve.benchmarks.twin.bench", "real runs against their twins: errors, intervals, what is off"),
    "compare": ("splitserve.benchmarks.goodput.compare", "two runs of bench goodput: ratios, intervals, regressions"),
    "latency": ("splitserve.benchmarks.serving.latency", "TTFT and second token of 1P1D against a mixed worker"),
    "client": ("splitserve.benchmarks.serving.client_limits", "what the load generator can offer on this machine"),
    "isolation": (
        "splitserve.benchmarks.serving.isolation",
        "gaps between tokens while other requests' prompts arrive, P/D or mixed",
    ),
    "attacks": (
        "splitserve.benchmarks.attacks.bench",
        "hostile HTTP clients beside a stream: its gaps, the router's memory",
    ),
    "router": ("splitserve.benchmarks.router.overhead", "overhead of the router over a worker that answers at once"),
    "router-limits": (
        "splitserve.benchmarks.router.limits",
        "limits of one router process: CPU, latency by rate, streams, long prompts, memory",
    ),
    "observability": (
        "splitserve.benchmarks.router.observability",
        "CPU time that timeline, log, metrics and traces add to the router",
    ),
    "placement": (
        "splitserve.benchmarks.placement.bench",
        "placement on replayed traces, with the router's production core under virtual time",
    ),
    "chaos": (
        "splitserve.benchmarks.chaos.chaos",
        "kills, freezes and drains under load: correct tokens, nothing left over",
    ),
    "engine-loop": (
        "splitserve.benchmarks.engine.engine_loop",
        "host overhead of a GPU's steps, with a timer in place of the GPU",
    ),
    "awake-cores": (
        "splitserve.benchmarks.engine.awake_cores",
        "effect of --keep-cores-awake on this machine: wake-ups, delays",
    ),
    "kernels": ("splitserve.benchmarks.kernels.kernels", "each operation on each backend, at the shapes of a model"),
    "layout": ("splitserve.benchmarks.kernels.layout", "cost of the KV blocks' layout for attention"),
    "cluster": (
        "splitserve.benchmarks.cluster.cluster",
        "several machines on Ray: start, death, arrival, scaling, upgrade",
    ),
    "up": ("splitserve.benchmarks.cluster.up_times", "from one command to a cluster that answers, locally and on Ray"),
    "engine": (
        "splitserve.benchmarks.engine.engine",
        "decode steps and prefills of a GPU, as shares of its peak",
    ),
    "all-reduce": ("splitserve.benchmarks.kernels.all_reduce", "each all-reduce over GPUs, by size"),
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
    "tier-soak": ("splitserve.benchmarks.kv.tier_soak", "requests on far too small or damaged tiers: correct tokens"),
    "sampling": ("splitserve.benchmarks.engine.sampling_costs", "what sampling features add to a step, on this CPU"),
    "engine-cpu": ("splitserve.benchmarks.engine.engine_vs_transformers", "the engine on CPU against transformers"),
}
TOOLS = {
    "tune": ("splitserve.benchmarks.kernels.tune", "find the fastest launch parameters of kernels on this GPU"),
    "simulate": ("splitserve.benchmarks.twin.simulate", "show what a cluster would do under a workload"),
    "calibrate": ("splitserve.benchmarks.twin.calibrate", "save a running cluster's step times, for the two others"),
    "plan": ("splitserve.benchmarks.twin.plan", "rank the arrangements of N devices for a workload"),
}
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHES:
            return _main_of(BENCHES[arguments[1]][0], arguments[2:])  # a bench's options are its module's own
        if arguments[:1] and arguments[0] in TOOLS:
            return _main_of(TOOLS[arguments[0]][0], arguments[1:])
        options = build_parser().parse_args(arguments)
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has closed it, like head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again at its exit
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
    add_operation_commands(commands)
    add_lmcache_command(commands)
    _add_doctor(commands)
    add_models_command(commands)
    add_trace_command(commands)
    add_top_command(commands)
    _add_spec_commands(commands)
    _add_demo(commands)
    _add_demo_model(commands)
    bench = commands.add_parser("bench", help="measure: " + ", ".join(BENCHES))
    names = bench.add_subparsers(required=True, metavar="BENCH")
    for name, (_, help_text) in BENCHES.items():
        names.add_parser(name, help=help_text)
    for name, (_, help_text) in TOOLS.items():
        commands.add_parser(name, help=help_text)
    version = commands.add_parser("version", help="show the version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a Hugging Face checkpoint behind an OpenAI-compatible endpoint",
        description="Serve a checkpoint: --prefill P --decode D to disaggregate, --mixed N not to; or --spec FILE.",
        formatter_class=HelpFormatter,
    )
    add_spec_option(parser)
    add_run_options(parser)
    parser.add_argument("--verbose", action="store_true", help="show the processes' logs of the start, too")
    parser.set_defaults(run=_serve)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="show one request's whole path: a small checkpoint, 1 prefill + 1 decode worker, a streamed chat",
        description="Serve a small checkpoint disaggregated, send one streamed chat request, show its path and times.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--model", default="", metavar="PATH", help="checkpoint to serve; empty: build one")
    parser.add_argument("--prompt", default="", help="prompt of the chat; empty: a text of a few KV blocks")
    parser.add_argument(
        "--max-tokens", type=whole_number(1, 4096), default=48, help="maximum length of the answer in tokens"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="log level of every process")
    parser.set_defaults(run=_demo)


def _add_demo_model(commands: Any) -> None:
    parser = commands.add_parser(
        "demo-model", help="write a random Hugging Face checkpoint, the same each time", formatter_class=HelpFormatter
    )
    parser.add_argument("directory", type=path, metavar="DIR", help="created if needed; a checkpoint in it is replaced")
    parser.add_argument("--shape", default="tiny", help="tiny, or the true shape of qwen3-0.6b, llama-3.2-1b, ...")
    parser.add_argument("--architecture", choices=("qwen3", "llama"), help="by default the shape's own")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the shape's own"
    )
    parser.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, help="seed of the weights")
    parser.add_argument(
        "--max-shard-size", type=positive_bytes, default="5GB", metavar="SIZE", help="maximum size of each weight file"
    )
    parser.set_defaults(run=_demo_model)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find the problems of this machine or of a running cluster, and their remedies",
        description="Check this machine, serving MODEL on it, or --against a running cluster; "
        "then send a request through the real path. Exit status: 0 no problem, 1 problems, 2 the check "
        "couldn't run.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--against", default="", metavar="URL", help="check the cluster with this endpoint")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=True, help="send a request through the real path"
    )
    parser.add_argument(
        "--transport",
        default="",
        metavar="NAME",
        help="transport expected for KV, like tcp; empty: the fastest available",
    )
    add_spec_option(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="error", help="log level of this command")
    parser.set_defaults(run=_doctor)


def _add_spec_commands(commands: Any) -> None:
    """Add ``spec`` and its subcommands to ``commands``, those of ``splitserve``."""
    parser = commands.add_parser("spec", help="check, show or describe cluster specs (YAML)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="report errors of a spec, and their locations")
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--document-only",
        action="store_true",
        help="don't check the files and variables of this machine that the spec refers to",
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
    from splitserve.orchestration.spec.hub import with_local_model
    from splitserve.orchestration.spec.start_checks import check_start

    os.environ[FORMAT_VARIABLE] = options.log_format  # child processes inherit it
    set_up_logging("launcher", options.log_level)
    spec = with_local_model(cluster_spec(options))
    with errors_in_options(options):
        check_start(spec)
    return serve(spec, options.log_level, restart=options.restart, verbose=options.verbose)


def _doctor(options: argparse.Namespace) -> int:
    if options.transport and not (options.probe or options.against):
        raise ConfigError("--transport needs the probe or --against: remove --transport or --no-probe")
    if options.against and (options.model or options.spec):
        raise ConfigError("--against checks a running cluster: remove MODEL and --spec")
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
    """Run the ``main`` of a module.

    SIGTERM ends it in order, as Ctrl-C does; otherwise a worker that a bench has frozen would stay frozen for ever.
    """
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
