"""A mixed worker whose device is a timer: engine loop, core, sockets and executor are the real ones.

A step takes as long as it would on a GPU, ``step_seconds`` plus ``prefill_seconds_per_token``, and draws arbitrary
tokens; launching it holds the interpreter for ``launch_seconds``, like building and launching a real step. The rest is
the host's work. Run one with ``python -m splitserve.benchmarks.engine.paced_worker --membership tcp://127.0.0.1:PORT``.
On SIGTERM it ends and prints one line of JSON: :class:`DeviceReport`.
"""

import argparse
import itertools
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from splitserve.benchmarks.common.stats import percentiles_ms
from splitserve.engine.io.membership_client import MembershipClient
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.engine.io.waker import Waker
from splitserve.engine.loop import WorkerIO, WorkerLoop
from splitserve.engine.steps.executor import OverlappedExecutor, always_works
from splitserve.engine.steps.launch_pace import LaunchPace
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.tiers.copies import LocalTierCopier
from splitserve.kvconnector.transfer.inproc import InprocConnector, InprocRegistry
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.config import EngineConfig, ProtocolConfig, WorkerConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import LaunchingRunner, StepOutput, StepPlan
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


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of consecutive steps with a full batch: the device's busy time and the host's processor time."""

    steps: int
    busy_share: float  # share of the time in which the device had work
    idle_ms: dict[str, float]  # time that the device waited for a step that it could have begun
    loop_cpu_us: float  # processor time per step of the loop's thread, launching included
    process_cpu_us: float  # processor time per step of all threads, launching included


@dataclass(frozen=True, slots=True)
class _Step:
    num_chunks: int
    is_decode: bool
    launched: float
    begin: float
    end: float
    loop_cpu_seconds: float
    process_cpu_seconds: float


@dataclass(frozen=True, slots=True)
class _Pending:
    output: StepOutput
    queued_at: float
    end: float

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return self.output


@dataclass(slots=True)
class PacedRunner:
    """Launching runner (:class:`splitserve.engine.steps.executor.LaunchingRunner`) whose device is a timer. ``steps``:
    the steps that it ran."""

    step_seconds: float
    prefill_seconds_per_token: float
    launch_seconds: float
    vocab_size: int
    loop_clock: int = time.CLOCK_PROCESS_CPUTIME_ID
    free_at: float = 0.0
    steps: list[_Step] = field(default_factory=list)
    tokens: "itertools.count[int]" = field(default_factory=itertools.count)

    def launch(self, plan: StepPlan) -> _Pending:
        ready = time.perf_counter() + self.launch_seconds
        while time.perf_counter() < ready:
            pass
        num_prefill_tokens = plan.num_tokens - len(plan.chunks)
        seconds = self.step_seconds + num_prefill_tokens * self.prefill_seconds_per_token
        launched = time.perf_counter()
        begin = max(launched, self.free_at)
        self.free_at = begin + seconds
        self.steps.append(
            _Step(
                num_chunks=len(plan.chunks),
                is_decode=num_prefill_tokens == 0,
                launched=launched,
                begin=begin,
                end=self.free_at,
                loop_cpu_seconds=time.clock_gettime(self.loop_clock),
                process_cpu_seconds=time.process_time(),
            )
        )
        drawn = [None if chunk.sample is None else next(self.tokens) % self.vocab_size for chunk in plan.chunks]
        return _Pending(StepOutput.of(drawn), time.monotonic(), self.free_at)

    def report(self) -> DeviceReport | None:
        """Report on the longest run of decode steps with the largest number of sequences; None without one."""
        decodes = [step.num_chunks for step in self.steps if step.is_decode]
        full = max(decodes, default=0)
        runs = [
            list(run)
            for is_full, run in itertools.groupby(self.steps, key=lambda s: s.is_decode and s.num_chunks == full)
            if is_full
        ]
        steps = max(runs, key=len, default=[])
        if len(steps) < 3:
            return None
        first, last, count = steps[0], steps[-1], len(steps) - 1
        idle = [late.begin - early.end for early, late in itertools.pairwise(steps)]
        return DeviceReport(
            steps=len(steps),
            busy_share=sum(step.end - step.begin for step in steps) / (last.end - first.begin),
            idle_ms=percentiles_ms(idle),
            loop_cpu_us=1e6 * (last.loop_cpu_seconds - first.loop_cpu_seconds) / count,
            process_cpu_us=1e6 * (last.process_cpu_seconds - first.process_cpu_seconds) / count,
        )


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
    parser.add_argument("--launch-us", type=float, default=300.0, help="host time to launch a step")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--late-launch", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    runner = PacedRunner(
        step_seconds=options.step_ms / 1e3,
        prefill_seconds_per_token=options.prefill_us_per_token / 1e6,
        launch_seconds=options.launch_us / 1e6,
        vocab_size=options.vocab_size,
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
