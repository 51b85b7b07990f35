"""A worker process from its config to its end: model, KV memory, connector, loop."""

import logging
import os
import secrets
import signal

import msgspec
import torch

from splitserve.config import WorkerConfig
from splitserve.decode.build import build_core
from splitserve.decode.served import Progress, ServedModel, device_of, load_served_model
from splitserve.errors import HandshakeError
from splitserve.kvconnector.digest import digests_of, first_digests_of, no_digests
from splitserve.kvconnector.nixl import NixlConnector
from splitserve.messages import WorkerInfo
from splitserve.models.cuda_runner import CudaRunner
from splitserve.models.parallel import Alone
from splitserve.prefill.executor import Executor, OverlappedExecutor, StepExecutor
from splitserve.prefill.loop import Waker, WorkerLoop
from splitserve.prefill.sockets import WorkerSockets
from splitserve.request import Party, Role
from splitserve.security import check_exposure, is_loopback

logger = logging.getLogger(__name__)


def run_worker(config: WorkerConfig, progress: Progress) -> None:
    """Serve until SIGTERM, which drains (a second one ends it at once), or SIGINT, which ends it at once.

    ``progress`` hears of the stages "weights", "kv_memory" and "ready". Raises :class:`CheckpointError` or
    :class:`ConfigError`, before the worker is known to anybody, for what can't be served; :class:`HandshakeError` if
    the router refuses it.
    """
    check_exposure(config.host, config.secret)
    if is_loopback(config.host):
        # UCX listens on every network interface and asks nobody who he is: keep it to this machine, too.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    threads = config.engine.threads or _num_usable_cores()
    torch.set_num_threads(threads)
    group = Alone()
    device = device_of(config.engine.device, group.shard.rank, group.shard.size)
    config = msgspec.structs.replace(config, engine=config.engine.on(device.type))
    served = load_served_model(config.engine, device, group, progress)
    _serve(config, served, threads, progress)


def _serve(config: WorkerConfig, served: ServedModel, threads: int, progress: Progress) -> None:
    memory = served.memory
    me = Party(config.engine_id, secrets.randbits(63))
    waker = Waker()
    sockets = WorkerSockets(me, config.host, config.membership, config.secret)
    verify = config.engine.verify_kv
    connector = NixlConnector(me, memory, waker.wake, digests_of(memory) if verify else no_digests)
    core = build_core(
        config,
        me,
        memory.layout,
        memory.generations,
        connector,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        digest_blocks=first_digests_of(memory) if verify else no_digests,
    )
    info = WorkerInfo(
        party=me,
        role=Role(config.role),
        endpoint=sockets.endpoint,
        pid=os.getpid(),
        layout=memory.layout,
        num_blocks=memory.num_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
    )
    executor: Executor
    if isinstance(served.runner, CudaRunner):
        device = memory.blocks.device
        executor = OverlappedExecutor(served.runner, waker.wake, lambda: torch.cuda.synchronize(device))
    else:
        executor = StepExecutor(served.runner, waker.wake)
    loop = WorkerLoop(config, core, connector, executor, sockets=sockets, waker=waker, info=info)
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    while not loop.registered and not loop.stopping:
        loop.run_once()
        if loop.refusal:
            loop.stop()
    if loop.refusal:
        loop.run()  # which ends at once, and closes what it owns
        raise HandshakeError(f"the router refuses {config.engine_id}: {loop.refusal}")
    progress("ready", {"endpoint": sockets.endpoint, "threads": str(threads)})
    loop.run()
    logger.info("stopped; last load: %s", msgspec.json.encode(core.load()).decode())


def _num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
