"""``splitserve bench tensor-parallel``: steps of workers of several ranks against those of one.

Every number of ranks runs in a process of its own, through a worker's code: rank 0 sends each step to the others and
launches it, two in flight at a time. A speedup is against the first number of ranks given. A digest of the greedy
tokens shows whether they are equal: they should be in float32; in bfloat16 sums round differently.
"""

import argparse
import functools
import hashlib
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from splitserve.benchmarks.common.arguments import not_negative, positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.kernels.times import busy_share, by_kernel, device_spans
from splitserve.common.errors import SplitserveError
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.models.demo.checkpoint import SHAPES, write_demo_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import (
    MAX_STEPS_IN_FLIGHT,
    UNKNOWN_TOKEN,
    LaunchedStep,
    LaunchingRunner,
    SampleSpec,
    ScheduledChunk,
    StepOutput,
    StepPlan,
)
from splitserve.worker.ranks.others import RankError
from splitserve.worker.ranks.runner import RankedLauncher, RankedRunner
from splitserve.worker.ranks.team import Team, start_team
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.served_model import device_of, load_served_model

_WARM_UP_STEPS = 8
_PREFILL_RUNS = 4
_PROFILED_STEPS = 8
_SHOWN_KERNELS = 14


class Workload(msgspec.Struct, frozen=True):
    """Workload of every number of ranks."""

    engine: EngineConfig
    batches: list[int]
    context: int
    prompts: list[int]
    steps: int
    profile: bool


class Figures(msgspec.Struct, frozen=True):
    """Results of one number of ranks."""

    ranks: int
    milliseconds: dict[str, float]  # of one step, by case
    tokens: str  # digest of the greedy tokens
    busy: dict[str, float]  # with ``--profile``, rank 0's share of busy time, by case
    kernels: dict[str, list[dict[str, Any]]]  # with ``--profile``, rank 0's kernels, by case


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.workload:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        figures = _measure(msgspec.json.decode(arguments.workload, type=Workload))
        print(msgspec.json.encode(figures).decode(), flush=True)
        os._exit(0)  # NCCL's own shutdown would wait for that of CUDA graphs
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        model = arguments.model or str(write_demo_config(folder, shape=arguments.shape))
        results = [_in_a_process(_workload(arguments, model, ranks)) for ranks in arguments.ranks]
    first, *others = results
    headers = ["case", *(f"TP {result.ranks} ms" for result in results), *(f"TP {r.ranks} speedup" for r in others)]
    rows = [
        [case, *(r.milliseconds[case] for r in results), *(time_ / r.milliseconds[case] for r in others)]
        for case, time_ in first.milliseconds.items()
    ]
    print(table(rows, headers))
    print("greedy tokens:", ", ".join(f"TP {result.ranks} {result.tokens}" for result in results))
    for result in results:
        for case, found in result.kernels.items():
            print(f"TP {result.ranks}, {case}: busy {result.busy[case]:.1%}")
            shown = [[row["after_us"], row["us"], row["calls"], row["kernel"]] for row in found[:_SHOWN_KERNELS]]
            print(table(shown, ["us after the one before", "us", "calls", "kernel"]))
    data = {"model": arguments.model or arguments.shape, "results": [msgspec.to_builtins(r) for r in results]}
    keep_result("tensor-parallel", list(argv or ()), data, arguments)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="splitserve bench tensor-parallel", description=__doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", choices=sorted(SHAPES), help="shape of the model, with dummy weights"
    )
    parser.add_argument("--model", default="", metavar="PATH", help="a checkpoint instead, with its own weights")
    parser.add_argument("--dtype", default="auto", help="auto: the checkpoint's")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--context", type=positive, default=1024, metavar="TOKENS", help="context of each decoding sequence"
    )
    parser.add_argument("--prefill", type=positive, nargs="*", default=[1024, 8192], metavar="TOKENS")
    parser.add_argument("--steps", type=positive, default=100, help="decode steps that are timed per case")
    parser.add_argument(
        "--threads", type=not_negative, default=0, help="threads of a rank on CPU; 0: PyTorch's default"
    )
    parser.add_argument("--profile", action="store_true", help="time by kernel in steps of rank 0")
    add_result_options(parser, always=True)
    parser.add_argument("--workload", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _workload(arguments: argparse.Namespace, model: str, ranks: int) -> Workload:
    longest = max([arguments.context + arguments.steps + _WARM_UP_STEPS + 1, *arguments.prefill]) + 1
    engine = EngineConfig(
        model=model,
        dtype=arguments.dtype,
        device=arguments.device,
        load_format="auto" if arguments.model else "dummy",
        max_model_len=longest,
        max_num_batched_tokens=max([1024, *arguments.prefill, *arguments.batch]),
        max_num_seqs=max(arguments.batch),
        threads=arguments.threads or torch.get_num_threads(),
        tensor_parallel_size=ranks,
    )
    return Workload(engine, arguments.batch, arguments.context, arguments.prefill, arguments.steps, arguments.profile)


def _in_a_process(workload: Workload) -> Figures:
    command = [sys.executable, "-m", "splitserve.benchmarks.engine.tensor_parallel"]
    command += ["--workload", msgspec.json.encode(workload).decode()]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if run.returncode:
        ranks = workload.engine.tensor_parallel_size
        raise SplitserveError(f"the run with {ranks} ranks ended with exit status {run.returncode}; see above")
    return msgspec.json.decode(run.stdout.splitlines()[-1], type=Figures)


def _measure(workload: Workload) -> Figures:
    ranks = workload.engine.tensor_parallel_size
    device = device_of(workload.engine.device, 0, ranks)
    engine = workload.engine.on(device.type)
    torch.set_num_threads(engine.threads)
    with start_team(Party("bench", 1), Role.MIXED, engine, device, _on_failure) as team:
        clock = StartClock()
        served = load_served_model(engine, device, team.group, lambda _stage, _detail: None, clock)
        served.warm_up(clock)
        team.wait_until_ready()
        stepper = _Stepper(_launching(team, served.runner), engine.block_size, served.memory.num_blocks)
        times: dict[str, float] = {}
        busy: dict[str, float] = {}
        kernels: dict[str, list[dict[str, Any]]] = {}
        for batch in workload.batches:
            case = f"decode {batch} x {workload.context}"
            stepper.decode(batch, workload.context, _WARM_UP_STEPS)
            times[case] = 1e3 * stepper.decode(batch, workload.context, workload.steps) / workload.steps
        for length in workload.prompts:
            stepper.prefill(length)
            times[f"prefill {length}"] = 1e3 * statistics.median(stepper.prefill(length) for _ in range(_PREFILL_RUNS))
        if workload.profile:  # last: launches take longer once there was a profiler
            for case, run, num_steps in stepper.profiled(workload):
                spans = device_spans(run)
                busy[case], kernels[case] = busy_share(spans), by_kernel(spans, num_steps)
        return Figures(ranks, times, stepper.digest(), busy, kernels)


def _on_failure(error: RankError) -> None:
    print(error, file=sys.stderr, flush=True)


def _launching(team: Team, runner: ModelRunner) -> LaunchingRunner:
    if runner.launcher is not None:
        return runner.launcher if team.ranks is None else RankedLauncher(runner.launcher, team.ranks)
    return _AtOnce(runner if team.ranks is None else RankedRunner(runner, team.ranks))


class _AtOnce:
    """Launching runner on a CPU, whose steps are complete when they are launched."""

    def __init__(self, runner: ModelRunner | RankedRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return _Done(self._runner.run(plan), time.monotonic())


@dataclass(frozen=True, slots=True)
class _Done:
    output: StepOutput
    queued_at: float

    def wait(self) -> StepOutput:
        return self.output


class _Stepper:
    """Runner of steps over shuffled blocks; sequences share blocks if there are too few."""

    def __init__(self, runner: LaunchingRunner, block_size: int, num_blocks: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._on_device = not isinstance(runner, _AtOnce)
        self._drawn = hashlib.blake2b(digest_size=6)

    def digest(self) -> str:
        return self._drawn.hexdigest()

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Run ``num_steps`` steps of ``batch`` sequences from ``context`` tokens on; returns their seconds."""
        per_sequence = num_blocks_for(context + num_steps, self._block_size)
        tables = [
            [self._blocks[(index * per_sequence + i) % len(self._blocks)] for i in range(per_sequence)]
            for index in range(batch)
        ]
        pending: deque[LaunchedStep] = deque()
        tokens = [1 + index for index in range(batch)]
        started = time.perf_counter()
        for step in range(num_steps):
            follows = self._on_device and step > 0
            position = context + step
            chunks = [
                ScheduledChunk(
                    [UNKNOWN_TOKEN if follows else tokens[index]],
                    position,
                    table[: position // self._block_size + 1],
                    SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=position + 1),
                    index if follows else None,
                )
                for index, table in enumerate(tables)
            ]
            pending.append(self._runner.launch(StepPlan(chunks)))
            if not self._on_device or len(pending) == MAX_STEPS_IN_FLIGHT:
                tokens = self._finish(pending.popleft())
        while pending:
            self._finish(pending.popleft())
        return time.perf_counter() - started

    def prefill(self, length: int) -> float:
        """Run one prompt in one step; returns its seconds."""
        table = [self._blocks[i % len(self._blocks)] for i in range(num_blocks_for(length, self._block_size))]
        spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=length)
        tokens = [1 + i % 1000 for i in range(length)]
        started = time.perf_counter()
        self._finish(self._runner.launch(StepPlan([ScheduledChunk(tokens, 0, table, spec)])))
        return time.perf_counter() - started

    def profiled(self, workload: Workload) -> Iterator[tuple[str, Callable[[], float], int]]:
        """Yield each case with a run of it, and its number of steps."""
        for batch in workload.batches:
            decode = functools.partial(self.decode, batch, workload.context, _PROFILED_STEPS)
            yield f"decode {batch} x {workload.context}", decode, _PROFILED_STEPS
        for length in workload.prompts:
            yield f"prefill {length}", functools.partial(self.prefill, length), 1

    def _finish(self, step: LaunchedStep) -> list[int]:
        tokens = [token for token in step.wait().token_ids if token is not None]
        self._drawn.update(repr(tokens).encode())
        return tokens


if __name__ == "__main__":
    raise SystemExit(main())
