"""A worker process from its config to its end: model, KV memory, connector, loop."""

import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.common.security import check_exposure, is_loopback
from splitserve.engine.io.kv_event_socket import KVEventSocket, NoKVEvents
from splitserve.engine.io.membership_client import MembershipClient
from splitserve.engine.io.sleepy_cores import Cores
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.engine.io.waker import Waker
from splitserve.engine.loop import WorkerIO, WorkerLoop
from splitserve.engine.profiling.step_profiler import NoProfiler, ProfiledLaunchingRunner, ProfiledRunner, StepProfiler
from splitserve.engine.steps.executor import Executor, StepExecutor
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.kvconnector.blocks.digest import FirstDigests, digests_of, no_digests
from splitserve.kvconnector.cuda.memory import make_context_current
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.ranks.copies import RankedTierCopier
from splitserve.kvconnector.ranks.transfers import RankedConnector
from splitserve.kvconnector.tiers.copies import LocalTierCopier, TierCopier
from splitserve.kvconnector.transfer.connector import KVConnector
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.models.parallel.ranks import Collectives
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.engine_config import machine_problems
from splitserve.protocol.memory_records import HostTierMemory
from splitserve.protocol.messages.membership import WorkerInfo, WorkerSetup
from splitserve.protocol.request import Party, Role
from splitserve.protocol.settings import SettingsError
from splitserve.worker.build import BlockMemory, ModelBounds, build_core
from splitserve.worker.machine.awake_cores import kept_awake
from splitserve.worker.machine.threads import give_way, pin_threads
from splitserve.worker.ranks.others import RankError, Ranks
from splitserve.worker.ranks.runner import RankedLauncher, RankedRunner
from splitserve.worker.ranks.starts import threads_per_rank
from splitserve.worker.ranks.team import Team, start_team
from splitserve.worker.start.beside import Beside
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.kv_tiers import RankTiers, make_tiers
from splitserve.worker.start.registration import setup_of
from splitserve.worker.start.served_model import Progress, ServedModel, device_of, load_served_model

logger = logging.getLogger(__name__)

Loader = Callable[[EngineConfig, torch.device, Collectives, Progress, StartClock | None], ServedModel]
END_SECONDS = 3.0
"""The time in which a worker that has lost a rank must end."""
MIN_AWAKE_CPUS = 4
"""The fewest hardware threads kept awake: for the loop, the threads that launch and wait, and those that read."""


def run_worker(config: WorkerConfig, progress: Progress, load: Loader = load_served_model) -> None:
    """Serve until SIGTERM, which drains (a second one ends it at once), or SIGINT, which ends it at once.

    ``progress`` is called at the stages "weights", "kv_memory" and "ready", and at "dismissed" when an operator asks it
    to leave. Raises :class:`CheckpointError` or
    :class:`ConfigError`, before the worker registers, for a model or settings that can't be served;
    :class:`HandshakeError` if the router refuses it; :class:`RankError` when one of its ranks is lost. ``load``: loads
    the model, and makes its runner.
    """
    clock = StartClock()
    check_exposure(config.host, config.secret)
    size = config.engine.tensor_parallel_size
    device = device_of(config.engine.device, 0, size)
    set_up_ucx(config.host, device)
    problems = list(machine_problems(config.engine, os.cpu_count() or 1))
    if problems:
        raise SettingsError(problems)
    give_way(device)
    threads = threads_per_rank(config.engine)
    torch.set_num_threads(threads)
    config = msgspec.structs.replace(
        config, engine=msgspec.structs.replace(config.engine.on(device.type), threads=threads)
    )
    if config.engine.keep_cores_awake and device.type == "cpu":
        raise ConfigError(
            "a worker on a CPU needs the cores for its model: --keep-cores-awake is for GPUs; go without it"
        )
    if config.engine.keep_cores_awake and len(usable_cpus()) < MIN_AWAKE_CPUS:
        raise ConfigError(
            f"with --keep-cores-awake a worker has half of the cores, here {len(usable_cpus())} hardware threads; "
            f"it needs {MIN_AWAKE_CPUS}: give it more, or go without"
        )
    me = Party(config.engine_id, secrets.randbits(63))
    on_rank_failure = _EndWithRank(progress)
    with (
        kept_awake(config.engine.keep_cores_awake, usable_cpus()) as cores,
        start_team(me, config.role, config.engine, device, on_rank_failure, affinity=config.affinity) as team,
    ):
        served = load(config.engine, device, team.group, progress, clock)
        pace = LaunchPace() if config.engine.late_launch else None
        make_executor = partial(_make_executor, served.runner, team.ranks, pace)
        watch = on_rank_failure.watch
        _serve(config, me, served, make_executor, progress, team=team, clock=clock, watch=watch, cores=cores)


def set_up_ucx(host: str, device: torch.device) -> None:
    """Set the environment variables of UCX that follow from a worker's address and device, unless they are set."""
    if not is_loopback(host):
        return
    # UCX listens on every network interface without authentication: restrict it to this machine, too.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if device.type == "cpu":
        # UCX would watch for memory that is unmapped while a network card or a GPU knows it: there is none of either.
        # To patch itself into the C library takes it 0.4 s, in which it keeps a core busy.
        os.environ.setdefault("UCX_MEM_EVENTS", "n")


class _EndWithRank:
    """The end of a worker that has lost a rank. It reports the loss at once, and ends in order, or else by SIGALRM,
    since a device operation that waits for a lost rank may never end."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loop: WorkerLoop | None = None

    def watch(self, loop: WorkerLoop) -> None:
        self._loop = loop

    def __call__(self, error: RankError) -> None:
        logger.error("%s", error)
        self._progress("error", {"message": str(error)})
        signal.setitimer(signal.ITIMER_REAL, END_SECONDS)
        if self._loop is not None:
            self._loop.end_with(error)


def _make_executor(
    runner: ModelRunner,
    ranks: Ranks | None,
    pace: LaunchPace | None,
    wake: Callable[[], None],
    profiler: StepProfiler | None,
) -> Executor:
    """Return the executor of all ranks' steps. The profiler records rank 0, which is this process."""
    check_device = runner.check_device if ranks is None else ranks.check
    if runner.launcher is None:
        running = runner if ranks is None else RankedRunner(runner, ranks)
        return StepExecutor(running if profiler is None else ProfiledRunner(running, profiler), wake, check_device)
    launching = runner.launcher if ranks is None else RankedLauncher(runner.launcher, ranks)
    profiled = launching if profiler is None else ProfiledLaunchingRunner(launching, profiler)
    return OverlappedExecutor(profiled, wake, check_device, pace)


def _make_profiler(config: WorkerConfig, device: torch.device, wake: Callable[[], None]) -> StepProfiler | None:
    directory = config.engine.profile_dir
    return StepProfiler(Path(directory), f"{config.role}.{config.engine_id}", device, wake) if directory else None


def _make_connector(
    me: Party, memory: KVMemory, wake: Callable[[], None], engine: EngineConfig, host: HostTierMemory | None
) -> NixlConnector:
    """Return the connector of this rank. ``host`` is a tier that peers may read."""
    settings = ReadSettings.of(memory.kind, num_threads=engine.read_threads, maps=engine.map_peer_memory)
    digest_blocks = digests_of(memory) if engine.verify_kv else no_digests
    return NixlConnector(me, memory, wake, digest_blocks, settings=settings, host=host)


def _serve(
    config: WorkerConfig,
    me: Party,
    served: ServedModel,
    make_executor: Callable[[Callable[[], None], StepProfiler | None], Executor],
    progress: Progress,
    *,
    team: Team,
    clock: StartClock,
    watch: Callable[[WorkerLoop], None],
    cores: Cores,
) -> None:
    memory = served.memory
    waker = Waker()
    sockets = WorkerSockets(me, config.host, config.membership, config.secret)
    # While CUDA graphs are captured, no other thread may register their device's memory; the warm-up replays them.
    transfers = Beside(
        "transfers-start", partial(_make_transfers, config.engine, me, served, team=team, wake=waker.wake, clock=clock)
    )
    served.warm_up(clock)
    team.wait_until_ready()
    tiers, connector, copies = transfers.wait()
    for link in team.links:
        sockets.watch(link.fileno())
    for name, holds in tiers.describe():
        logger.info("KV tier %s: %s", name, holds)
        progress("kv_tier", {"name": name, "holds": holds})
    blocks = BlockMemory(
        memory.layout,
        memory.generations,
        other_generations=[group.generations for group in memory.groups[1:]],
        leading_digests=FirstDigests(memory, waker.wake) if config.engine.verify_kv else no_digests,
        tiers=tiers.tiers,
        shared_tier=tiers.shared,
    )
    core = build_core(config, me, blocks, connector, ModelBounds(served.max_model_len, served.vocab_size))
    kv_events = KVEventSocket(sockets) if config.engine.kv_events else NoKVEvents()
    setup = setup_of(config, memory, tiers.host, served.runner.model.kernels.backends)
    progress("placement", {"remote_bytes": str(setup.remote_bytes), "machine": setup.machine})
    info = _worker_info(config, me, served, setup, endpoint=sockets.endpoint, kv_events_endpoint=kv_events.endpoint)
    profiler = _make_profiler(config, memory.device, waker.wake)
    executor = make_executor(waker.wake, profiler)
    io = WorkerIO(sockets, waker, connector, executor, copies, profiler or NoProfiler(), kv_events, cores)
    membership = MembershipClient(config, info, sockets, team.pids)
    explain = None if team.ranks is None else team.ranks.explain
    loop = WorkerLoop(config, core, io, membership, explain, estimate=served.step_estimates[config.role])
    pin_threads(config.affinity)
    loop.on_dismissed = lambda: progress("dismissed", {})
    watch(loop)
    _run(loop, config, clock, lambda detail: progress("ready", {"endpoint": sockets.endpoint, **detail}))
    logger.info("stopped")
    logger.debug("last load: %s", msgspec.json.encode(core.load()).decode())


def _worker_info(
    config: WorkerConfig, me: Party, served: ServedModel, setup: WorkerSetup, *, endpoint: str, kv_events_endpoint: str
) -> WorkerInfo:
    """Return the record with which the worker registers."""
    return WorkerInfo(
        party=me,
        role=Role(config.role),
        endpoint=endpoint,
        pid=os.getpid(),
        layout=served.memory.layout,
        num_blocks=served.memory.num_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        kv_events_endpoint=kv_events_endpoint,
        setup=setup,
        prefix_caching=config.engine.enable_prefix_caching,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_num_prefill_tokens=config.engine.max_num_prefill_tokens_beside_decode,
        max_num_sized_tokens=config.engine.max_num_prefill_tokens_within_objective,
    )


def _run(loop: WorkerLoop, config: WorkerConfig, clock: StartClock, on_ready: Callable[[dict[str, str]], None]) -> None:
    """Register, then serve until a signal. Raises :class:`HandshakeError` if the router refuses it."""
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    while not loop.registered and not loop.stopping:
        loop.run_once()
    if loop.stopping:
        loop.run()  # which ends at once, closes what it owns, and raises what there is to raise
        return
    # What the start allocated lives as long as the process: a full pass of the collector over it would stall a step.
    gc.collect()
    gc.freeze()
    logger.info("ready after %s", clock)
    on_ready({"threads": str(config.engine.threads), "seconds": f"{clock.total_seconds:.1f}"})
    loop.run()


def _make_transfers(
    engine: EngineConfig, me: Party, served: ServedModel, *, team: Team, wake: Callable[[], None], clock: StartClock
) -> tuple[RankTiers, KVConnector, TierCopier]:
    """Return the tiers, the connector and the copies of this rank, joined with those of the team's others."""
    make_context_current(served.memory.device)
    with clock.phase("KV tiers, beside the warm-up"):
        tiers = make_tiers(engine, me.engine_id, served.memory, gates=served.gates)
    with clock.phase("connector, beside the warm-up"):
        local = _make_connector(me, served.memory, wake, engine, tiers.served)
        copies = LocalTierCopier(tiers.stores, wake)
        if not team.links:
            return tiers, local, copies
        connector = RankedConnector(local, team.links)
        tiers.keep_common(connector.found)
        return tiers, connector, RankedTierCopier(copies, connector)
