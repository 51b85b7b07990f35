"""``splitserve bench chaos``: workers die, freeze and drain under load, without an effect on any client.

A small float32 checkpoint, 2 prefill and 2 decode processes, real NIXL. First a quiet run records the tokens of every
request; then streams send them again, many at once, while random workers get SIGKILL, SIGSTOP for longer than a lease,
or SIGTERM, and are started again. Exit status 0 means: every request completed with exactly the quiet run's answer,
streams of killed workers continued in time, and afterwards no blocks are held, nothing is left over, and no process has
grown. In float32 on a CPU an answer that differs is wrong. Elsewhere rounding depends on the batch: there each token
that differs must be a near-tie in float64 (:mod:`.ties`).
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from splitserve.benchmarks.chaos.checks import Leftovers, Metrics, growth, process_states
from splitserve.benchmarks.chaos.faults import FaultInjector, FaultKind
from splitserve.benchmarks.chaos.load import Answer, Streams, make_cases, record_expected
from splitserve.benchmarks.chaos.outcome import Outcome, print_summary, say, summary
from splitserve.benchmarks.chaos.recovery import p99_seconds
from splitserve.benchmarks.chaos.ties import NEAR_TIE_SHARES, Referee
from splitserve.benchmarks.common.arguments import finite, positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, kept_options
from splitserve.common.logs import LOG_LEVELS, set_up_logging
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.hosts.forking import close_fork_servers
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, DevicesSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig

TRANSPORTS: dict[str, dict[str, str]] = {"shm": {}, "tcp": {"UCX_TLS": "tcp"}}
NUM_MIXTURES = {"cpu": 1, "cuda": 12}
"""Mixtures of the quiet run by device: on a GPU the order of additions in kernels depends on the batch size."""
# One decode worker must hold all streams, or those of a killed worker would wait for room; all prompts together need
# more, so that blocks are evicted, reused, and computed again.
KV_MEMORY_BYTES = 32 << 20
RECOVERY_BOUND_SECONDS = {"decode": 2.0, "prefill": 1.0}  # plus a prefill
MEMORY_BOUND_BYTES = 64 << 20
HANDLE_BOUND = 16
HANDLES_OF_A_PEER = 12
"""Handles of a connection, which a worker may first make in the storm: prefill reads prefixes from decode workers."""
SETTLE_TIMEOUT_SECONDS = 60.0


def cluster_spec(options: argparse.Namespace, model: str, *, num_prefill: int = 2, num_decode: int = 2) -> ClusterSpec:
    engine = EngineConfig(
        model=model,
        device=options.device,
        dtype=options.dtype,
        enforce_eager=options.device == "cuda" and not options.cuda_graphs,
        threads=1,
        block_size=16,
        kv_memory_bytes=KV_MEMORY_BYTES if options.dtype == "float32" else KV_MEMORY_BYTES // 2,
        max_num_batched_tokens=128,
        max_num_seqs=32,
        tail_chunk_tokens=16,
        max_model_len=1024,
    )
    protocol = ProtocolConfig(
        lease_seconds=options.lease_seconds,
        renew_interval_seconds=options.lease_seconds / 5,
        read_deadline_seconds=options.read_deadline_seconds,
        heartbeat_seconds=options.heartbeat_seconds,
        dead_after_seconds=options.dead_after_seconds,
        drain_seconds=options.drain_seconds,
    )
    devices = DevicesSpec(share=True)
    return simple_spec(
        engine, num_prefill=num_prefill, num_decode=num_decode, port=0, protocol=protocol, devices=devices
    )


async def fetch_metrics(session: aiohttp.ClientSession, url: str) -> Metrics:
    async with session.get(f"{url}/metrics") as response:
        return Metrics.parse(await response.text())


async def wait_until_quiet(session: aiohttp.ClientSession, cluster: LocalCluster) -> tuple[Metrics, list[str]]:
    """Wait until every worker is ready and no blocks are held for requests; returns the metrics, and the problems that
    remain at the deadline."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_SECONDS
    names = cluster.pids.keys() - {"router"}
    num_quiet = 0
    while True:
        # metrics come by heartbeat: two reads are more than one interval apart, lest an old figure pass for a new one
        await asyncio.sleep(1.2 * cluster.spec.protocol_config().heartbeat_seconds)
        metrics = await fetch_metrics(session, cluster.url)
        missing = sorted(names - metrics.ready)
        problems = metrics.held() + [f"{name} is not ready" for name in missing]
        num_quiet = 0 if problems else num_quiet + 1
        if num_quiet == 2 or time.monotonic() > deadline:
            return metrics, problems


async def storm(cluster: LocalCluster, options: argparse.Namespace, leftovers: Leftovers) -> Outcome:
    """Run the quiet run and the storm; returns the outcome, with the state after the storm."""
    cases = make_cases(cluster.spec.served_model_name, options.cases, options.seed)
    async with aiohttp.ClientSession() as session:
        say(f"quiet run: {len(cases)} requests, alone and {options.streams} at once")
        num_mixtures = NUM_MIXTURES[options.device]
        outcome = Outcome(await record_expected(cluster.url, cases, options.streams, num_mixtures))
        say(f"warm-up: {options.warm_up:g} s")
        warm_up = Streams(cluster.url, outcome.expected.cases, options.streams, options.seed, outcome.answers.append)
        await asyncio.sleep(options.warm_up)
        await warm_up.finish()
        before, problems = await wait_until_quiet(session, cluster)
        outcome.checks["quiet before the storm"] = problems
        outcome.before = process_states(cluster.pids)

        async def ready_workers() -> set[str]:
            return (await fetch_metrics(session, cluster.url)).ready

        outcome.injector = injector = FaultInjector(
            cluster,
            ready_workers,
            kinds=[FaultKind(kind) for kind in options.faults],
            freeze_seconds=options.lease_seconds + 0.5,
            pause_seconds=options.pause_seconds,
            seed=options.seed,
            before_fault=lambda: leftovers.note_pids(cluster.pids),
        )
        say(f"storm: {options.duration:g} s")
        streams = Streams(cluster.url, outcome.expected.cases, options.streams, options.seed, outcome.answers.append)
        try:
            await injector.run_until(time.monotonic() + options.duration)
            await injector.finish()
            await streams.finish()
        finally:
            injector.thaw_all()
        outcome.metrics, problems = await wait_until_quiet(session, cluster)
    leftovers.note_pids(cluster.pids)
    outcome.after = process_states(cluster.pids)
    outcome.checks["blocks free or cached, nothing held"] = problems + [
        f"{name}: {count} blocks free or cached of {before.free_or_cached()[name]}"
        for name, count in outcome.metrics.free_or_cached().items()
        if count != before.free_or_cached().get(name, count)
    ]
    outcome.checks["memory, threads, handles where they began"] = growth(
        outcome.before,
        outcome.after,
        memory_bytes=MEMORY_BOUND_BYTES,
        handles=HANDLE_BOUND + HANDLES_OF_A_PEER * len(outcome.before),
    )
    return outcome


def check_answers(outcome: Outcome, referee: Referee | None) -> None:
    """Check that every request completed with exactly the quiet run's answer, or one that ``referee`` accepts."""
    outcome.checks["answers repeat on a quiet system"] = wrong_answers(outcome, outcome.expected.unrepeated, referee)
    outcome.checks["all requests complete with the quiet run's tokens"] = wrong_answers(
        outcome, outcome.answers, referee
    )
    outcome.checks["something happened"] = [
        text
        for missing, text in (
            (not outcome.answers, "no request was made"),
            (not outcome.injector or not outcome.injector.faults, "no fault was injected"),
        )
        if missing
    ]


def wrong_answers(outcome: Outcome, answers: Sequence[Answer], referee: Referee | None) -> list[str]:
    """Describe the answers that are wrong, and count those that near-ties explain."""
    bodies = {case.name: case.body for case in outcome.expected.cases}
    wrong = []
    for answer in answers:
        difference = answer.difference(outcome.expected.answers[answer.case])
        if not difference:
            continue
        if referee is not None and not answer.error:
            difference = referee.problem(bodies[answer.case], answer)
        if difference:
            attempts = ", ".join(f"{attempt.worker} {attempt.reason}" for attempt in answer.failed_attempts)
            wrong.append(f"{answer.case}: {difference} (failed attempts: {attempts or 'none'})")
        else:
            outcome.num_near_ties += 1
    return wrong


def check_recovery(outcome: Outcome, options: argparse.Namespace) -> None:
    """Check that streams of killed workers continue in time, and those of frozen workers in time after the
    detection."""
    assert outcome.injector is not None
    prefill_seconds = max(outcome.expected.ttft_seconds)
    detection_seconds = {FaultKind.KILL: 0.0, FaultKind.FREEZE: options.dead_after_seconds}
    problems = []
    for kind, seconds in detection_seconds.items():
        for role, bound in RECOVERY_BOUND_SECONDS.items():
            p99 = p99_seconds(outcome.answers, outcome.injector.faults, kind, role)
            limit = seconds + bound + prefill_seconds
            if p99 is not None and p99 > limit:
                problems.append(f"p99 after the {kind.value} of a {role} worker is {p99:.2f} s, at most {limit:.2f} s")
    outcome.checks["streams of killed and frozen workers go on in time"] = problems


def run(options: argparse.Namespace) -> Outcome:
    """Run everything, from the checkpoint to the search for leftovers."""
    leftovers = Leftovers()
    with tempfile.TemporaryDirectory(prefix="splitserve-chaos-") as directory:
        model = str(write_demo_model(Path(directory) / "model", dtype=options.dtype))
        cluster = LocalCluster(
            cluster_spec(options, model),
            log_level=options.log_level,
            environment={**TRANSPORTS[options.transport], **leftovers.environment},
        )
        with cluster, cluster.supervised():
            leftovers.note_pids(cluster.pids)
            outcome = asyncio.run(storm(cluster, options, leftovers))
        close_fork_servers()  # which live on for the next cluster of this process
        outcome.checks["no process, thread, handle or shared memory left over"] = leftovers.found()
        is_exact = options.device == "cpu" and options.dtype == "float32"
        check_answers(outcome, None if is_exact else Referee(model, NEAR_TIE_SHARES[options.dtype], options.device))
    if options.check_times:
        check_recovery(outcome, options)
    return outcome


def build_parser() -> argparse.ArgumentParser:
    defaults = ProtocolConfig()
    parser = CommandParser(
        prog="splitserve bench chaos", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--duration", type=positive_seconds, default=600.0, metavar="SECONDS", help="duration of the storm"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the workers; with cuda they share the GPUs"
    )
    parser.add_argument(
        "--dtype", choices=sorted(NEAR_TIE_SHARES), default="float32", help="of weights, computation and KV"
    )
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="with CUDA graphs: workers that died are ready later"
    )
    parser.add_argument(
        "--transport", choices=sorted(TRANSPORTS), default="shm", help="transport of KV; shm: UCX's own choice"
    )
    parser.add_argument("--streams", type=positive, default=16, help="requests in flight at any time")
    parser.add_argument("--cases", type=positive, default=48, help="different requests")
    parser.add_argument("--faults", nargs="+", choices=[kind.value for kind in FaultKind], default=list(FaultKind))
    parser.add_argument(
        "--warm-up",
        type=finite,
        default=30.0,
        metavar="SECONDS",
        help="time under load before memory is first measured",
    )
    parser.add_argument("--pause-seconds", type=finite, default=2.0, help="minimum mean time between faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and faults")
    for name in ("lease", "read_deadline", "heartbeat", "dead_after", "drain"):
        flag, value = f"--{name.replace('_', '-')}-seconds", getattr(defaults, f"{name}_seconds")
        parser.add_argument(flag, type=positive_seconds, default=value, help="as in ProtocolConfig")
    parser.add_argument(
        "--check-times",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="off: accept correct answers however late",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="error", help="log level of every process")
    add_result_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(list(argv))
    set_up_logging("launcher", options.log_level)
    outcome = run(options)
    figures = summary(outcome)
    print_summary(figures, outcome)
    keep_result("chaos", argv, {"options": kept_options(options), **figures}, options)
    return 0 if outcome.ok else 1
