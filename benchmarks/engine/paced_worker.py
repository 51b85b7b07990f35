"""A mixed worker whose device is a timer: engine loop, core, sockets and executor are the real ones.

A step takes as long as it would on a GPU, ``--step-ms`` plus ``--prefill-us-per-token``, and draws arbitrary tokens;
launching it holds the interpreter for ``--launch-us`` and ``--draws-us``, like building and launching a real step. The
rest is the host's work. Run one with
``python -m splitserve.benchmarks.engine.paced_worker --membership tcp://127.0.0.1:PORT``.
On SIGTERM it ends and prints one line of JSON: a :class:`splitserve.benchmarks.engine.paced_runner.DeviceReport`.
"""

import argparse
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from splitserve.benchmarks.engine.paced_runner import PacedRunner
from splitserve.engine.io.membership_client import MembershipClient
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.engine.io.waker import Waker
from splitserve.engine.loop import WorkerIO, WorkerLoop
from splitserve.engine.steps.failures import always_works
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.engine.steps.overlapped import OverlappedExecutor
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.tiers.copies import LocalTierCopier
from splitserve.kvconnector.transfer.inproc import InprocConnector, InprocRegistry
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.config import EngineConfig, ProtocolConfig, WorkerConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import LaunchingRunner
from splitserve.worker.build import BlockMemory, ModelBounds, build_core

ENGINE_ID = "paced-0"
MAX_MODEL_LEN = 8192
_LAYOUT = LayoutRecord(
    model="paced",
    weights_version="0",
    dtype="bfloat16",
    block_size=64,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
_NUM_BLOCKS = 12_000  # an H200's number for an 8B model: the pool's work depends on it


def build_loop(
    membership: str,
    runner: LaunchingRunner,
    *,
    max_num_seqs: int = 64,
    vocab_size: int = 1000,
    check_device: Callable[[], None] = always_works,
    late_launch: bool = True,
    protocol: ProtocolConfig | None = None,
) -> tuple[WorkerLoop, PeerRef]:
    """Build the engine loop around ``runner``; returns it and its address."""
    engine = EngineConfig(model="paced", block_size=64, max_num_seqs=max_num_seqs).on("cuda")
    config = WorkerConfig(
        engine_id=ENGINE_ID,
        role=Role.MIXED,
        engine=engine,
        membership=membership,
        protocol=protocol or ProtocolConfig(),
    )
    me = Party(ENGINE_ID, secrets.randbits(63))
    waker = Waker()
    memory = KVMemory(_LAYOUT, _NUM_BLOCKS)
    connector = InprocConnector(me, memory, waker.wake, InprocRegistry())
    blocks = BlockMemory(_LAYOUT, np.zeros(_NUM_BLOCKS, dtype=np.uint64))
    core = build_core(config, me, blocks, connector, ModelBounds(MAX_MODEL_LEN, vocab_size))
    sockets = WorkerSockets(me, config.host, membership)
    info = WorkerInfo(
        party=me,
        role=Role.MIXED,
        endpoint=sockets.endpoint,
        pid=1,
        layout=_LAYOUT,
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=vocab_size,
    )
    executor = OverlappedExecutor(runner, waker.wake, check_device, LaunchPace() if late_launch else None)
    io = WorkerIO(sockets, waker, connector, executor, LocalTierCopier({}, waker.wake))
    loop = WorkerLoop(config, core, io, MembershipClient(config, info, sockets))
    return loop, PeerRef(me, sockets.endpoint)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Prints its address at the start and its report at the end, as JSON lines."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--membership", required=True, help="the router's membership endpoint")
    parser.add_argument("--step-ms", type=float, default=6.5, help="time of a decode step")
    parser.add_argument("--prefill-us-per-token", type=float, default=20.0)
    parser.add_argument("--launch-us", type=float, default=300.0, help="host time to launch a forward pass")
    parser.add_argument("--draws-us", type=float, default=300.0, help="host time to launch its draws")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--late-launch", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    runner = PacedRunner(
        model=StepModel(base=options.step_ms / 1e3, per_token=options.prefill_us_per_token / 1e6),
        vocab_size=options.vocab_size,
        launch_seconds=options.launch_us / 1e6,
        draw_seconds=options.draws_us / 1e6,
        loop_clock=time.pthread_getcpuclockid(threading.get_ident()),
    )
    loop, where = build_loop(
        options.membership,
        runner,
        max_num_seqs=options.max_num_seqs,
        vocab_size=options.vocab_size,
        late_launch=options.late_launch,
    )
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    print(msgspec.json.encode(where).decode(), flush=True)
    loop.run()
    print(msgspec.json.encode(runner.report()).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
