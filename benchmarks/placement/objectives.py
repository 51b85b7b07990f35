"""The case ``objectives``: what arrangements of two GPUs hold within objectives at the 99th percentile, on the twin.

The load comes to a cluster that has had three requests, one at a time, and then rested. Steps are those of a roofline,
which the workers know, or such as were measured on H100s or H200s, to which they fit their models while they serve.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.goodput.estimate import Goodput, goodput_of
from splitserve.benchmarks.goodput.objectives import Objectives
from splitserve.benchmarks.goodput.probe import result_of
from splitserve.benchmarks.placement.measured_steps import H100Steps, H200Steps
from splitserve.benchmarks.twin.loads import records_of
from splitserve.benchmarks.twin.simulate import Cluster, clusters_of, parser
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.step_times import StepLaw
from splitserve.workloads.conversation import Workload
from splitserve.workloads.named import parse_workload

Row: TypeAlias = dict[str, Any]

ARMS = ("1P1D:least-loaded", "2M:prefix", "1P1D:cost")
TTFT_MS = {"2048/512": 500.0, "8192/64": 1000.0}
RATES = {
    "2048/512": (7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 18.0),
    "8192/64": (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0),
}
"""Requests per second that each arm is tried with, up to the first that it doesn't hold."""
ITL_MS = (12.0, 15.0, 20.0, 30.0)
LEAST_RATIO = 0.97
"""Goodput of ``cost`` over that of the better of the others, at least."""
NUM_EARLY = 3
EARLY_SECONDS = 4.0
"""For each of the early requests."""
REST_SECONDS = 5.0
NUM_RUNS = 4
USUAL_REQUESTS = 200


def objectives(count: int) -> Iterator[Row]:
    """Yield a row for each kind of steps, workload, objective for gaps, and arm."""
    for steps, gpu, law in (("known", "H200", None), ("fitted", "H100", H100Steps()), ("fitted", "H200", H200Steps())):
        clusters = clusters_of(parser().parse_args(["--gpu", gpu, "--cluster", *ARMS]))
        for workload in RATES:
            for itl_ms in ITL_MS:
                held = {each.name: _goodput(_with_law(each, law), workload, itl_ms, count) for each in clusters}
                yield from _rows({"steps": steps, "gpu": gpu, "workload": workload, "itl_ms": itl_ms}, held)


def _with_law(cluster: Cluster, law: StepLaw | None) -> Cluster:
    workers = [dataclasses.replace(worker, law=law) for worker in cluster.workers]
    return dataclasses.replace(cluster, workers=workers)


def _goodput(cluster: Cluster, workload: str, itl_ms: float, count: int) -> Goodput:
    points: list[tuple[float, float]] = []
    spec = TwinSpec(cluster.workers, cluster.calibration, cluster.policy, TTFT_MS[workload], itl_ms)
    for rate in RATES[workload]:
        pressures = []
        for seed in range(NUM_RUNS):
            load = after_rest(parse_workload(workload).at(rate, count, seed))
            result = result_of(cluster.name, rate, seed, load, records_of(TwinCluster(spec, seed).run(load, seed)))
            pressures.append(result.outcome.pressure(Objectives(TTFT_MS[workload], itl_ms)))
        points.append((rate, float(np.mean(pressures))))
        if points[-1][1] > 1.0:
            break
    return goodput_of(points)


def after_rest(load: Workload) -> Workload:
    """Return a load of which a few requests come before the others, one at a time, and are long done when they come."""
    first, *_ = load.conversations
    early = [
        dataclasses.replace(first, name=f"early {number}", start_seconds=number * EARLY_SECONDS)
        for number in range(NUM_EARLY)
    ]
    begin = NUM_EARLY * EARLY_SECONDS + REST_SECONDS
    late = [dataclasses.replace(each, start_seconds=begin + each.start_seconds) for each in load.conversations]
    return Workload(load.name, (*early, *late))


def _rows(labels: Row, held: dict[str, Goodput]) -> Iterator[Row]:
    for arm, goodput in held.items():
        row = labels | {"arm": arm, "goodput": goodput.rate, "bound": goodput.kind}
        if parse_arm(arm).is_conditional:
            row["goodput_ratio"] = goodput.rate / max(each.rate for name, each in held.items() if name != arm)
            row["holds"] = row["goodput_ratio"] >= LEAST_RATIO
        yield row
