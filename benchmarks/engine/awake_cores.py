"""``splitserve bench awake-cores``: effect of ``--keep-cores-awake`` on this machine, without a model or a GPU.

Slightly more processes than cores sleep for a millisecond and compute for a third of one, again and again, as the
threads of a cluster do. Reported are their wake-up delays, and how often one of them was delayed by more than a
millisecond: in its wake-up, or in its computation compared with the usual time. Runs with cores that may sleep and with
cores that are kept awake alternate.
"""

import argparse
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from splitserve.benchmarks.common.arguments import positive, positive_seconds
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.common.cores import awake_cpus, usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.kvconnector.transfer.owner_thread import wait_precisely
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.orchestration.hosts.topology import format_list, parse_list
from splitserve.worker.machine.awake_cores import check_cores_can_be_kept_awake, kept_awake

SLEEP_SECONDS = 0.0003, 0.0015
COMPUTE_SECONDS = 0.0003
PROCESSES_PER_CORE = 1.5
HELD_UP_SECONDS = 0.001
ARMS = {"asleep": False, "awake": True}
HEADERS = ["cores", "late p50 us", "p99", "p99.9", "max", "held up per 10,000"]


class Turns(NamedTuple):
    """Turns of one process, in seconds."""

    late: list[float]  # delay of each wake-up
    computing: list[float]  # time of each computation


def _compute(turns: int) -> None:
    total = 0
    for index in range(turns):
        total += index * index


def sleep_and_compute(cpus: Collection[int], seed: int, seconds: float) -> Turns:
    """Sleep and compute in turn for so many seconds: main of one process."""
    os.sched_setaffinity(0, cpus)
    wait_precisely()
    began = time.perf_counter()
    _compute(100_000)
    turns = max(1, round(100_000 * COMPUTE_SECONDS / (time.perf_counter() - began)))
    result, choice, end = Turns([], []), random.Random(seed), time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        sleep_seconds = choice.uniform(*SLEEP_SECONDS)
        time.sleep(sleep_seconds)
        woken = time.perf_counter()
        _compute(turns)
        result.late.append(woken - now - sleep_seconds)
        result.computing.append(time.perf_counter() - woken)
    return result


def held_up(turns: Turns) -> int:
    """Count the turns that were delayed by more than :data:`HELD_UP_SECONDS`."""
    usual = statistics.median(turns.computing)
    pairs = zip(turns.late, turns.computing, strict=True)
    return sum(late > HELD_UP_SECONDS or computing > usual + HELD_UP_SECONDS for late, computing in pairs)


def figures(processes: Sequence[Turns]) -> dict[str, float]:
    late = np.concatenate([turns.late for turns in processes]) * 1e6
    p50, p99, p999 = np.percentile(late, (50, 99, 99.9))
    share = sum(map(held_up, processes)) / len(late)
    found = {"late_p50_us": p50, "late_p99_us": p99, "late_p999_us": p999, "late_max_us": late.max()}
    return {name: float(value) for name, value in found.items()} | {"held_up_share": share, "turns": float(len(late))}


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="splitserve bench awake-cores", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add(
        "--cpus",
        default="",
        metavar="LIST",
        help="hardware threads, like 0-7,16; empty: those that a worker would use",
    )
    add("--seconds", type=positive_seconds, default=5.0, help="duration of each arm's run")
    add("--repeats", type=positive, default=3, help="runs of each arm")
    add_result_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    check_cores_can_be_kept_awake()
    try:
        cpus = set(parse_list(options.cpus)) if options.cpus else awake_cpus(usable_cpus())
    except ValueError:
        raise ConfigError(f"--cpus is {options.cpus!r}; write it like 0-7,16") from None
    if not cpus <= usable_cpus():
        raise ConfigError(f"--cpus: this process may use {format_list(usable_cpus())}")
    num_processes = math.ceil(PROCESSES_PER_CORE * len(cpus))
    found: dict[str, list[Turns]] = {arm: [] for arm in ARMS}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        # A short first run: after it all processes have started.
        pool.starmap(sleep_and_compute, [(cpus, seed, 0.2) for seed in range(num_processes)])
        for repeat in range(options.repeats):
            work = [(cpus, repeat * num_processes + seed, options.seconds) for seed in range(num_processes)]
            for arm, awake in ARMS.items():
                with kept_awake(awake, cpus):
                    found[arm] += pool.starmap(sleep_and_compute, work, chunksize=1)
    results = {arm: figures(processes) for arm, processes in found.items()}
    print(f"{num_processes} processes on hardware threads {format_list(cpus)}")
    names = ("late_p50_us", "late_p99_us", "late_p999_us", "late_max_us")
    rows = [
        [arm, *(f"{row[name]:.0f}" for name in names), f"{1e4 * row['held_up_share']:.1f}"]
        for arm, row in results.items()
    ]
    print(table(rows, HEADERS))
    keep_result("awake-cores", argv, {"results": results}, options)
    return 0
