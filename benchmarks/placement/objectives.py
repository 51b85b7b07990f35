"""The case ``objectives``: what arrangements of two GPUs hold within objectives at the 99th percentile, on the twin.

The load comes to a cluster that has had three requests, one at a time, and then rested. Steps are those of a roofline,
which the workers know, or of a law that is not linear, to which they fit their models while they serve.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.goodput.estimate import Goodput, goodput_of
from splitserve.benchmarks.placement.arrangements import Judged
from splitserve.benchmarks.twin.simulate import Cluster, clusters_of, parser
from splitserve.protocol.placement.step_model import StepWork
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.step_times import StepLaw
from splitserve.workloads.conversation import Workload
from splitserve.workloads.named import parse_workload

Row: TypeAlias = dict[str, Any]

ARMS = ("1P1D:least-loaded", "2M:prefix", "1P1D:cost")
TTFT_MS = {"2048/512": 500.0, "8192/64": 1000.0}
RATES = {"2048/512": (6.0, 7.5, 9.0, 10.5, 12.0, 14.0, 16.0), "8192/64": (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)}
"""Requests per second that each arm is tried with, up to the first that it doesn't hold."""
ITL_MS = (12.0, 15.0, 20.0)
LEAST_RATIO = 0.97
"""Goodput of ``cost`` over that of the better of the others, at least."""
FAILED_PRESSURE = 100.0
"""Ratio of its TTFT to the objective that a refused request counts as."""
NUM_EARLY = 3
EARLY_SECONDS = 4.0
"""For each of the early requests."""
REST_SECONDS = 5.0
NUM_RUNS = 2
USUAL_REQUESTS = 200


class MeasuredLaw:
    """Steps of an 8B model in bf16, about as runs on an H100 showed them (1127T193804, 1127T201810, 1127T202129): 5.6
    ms for one sequence of 2,300 tokens, 7.8 for 14, 11.3 for 57; 48 ms for a prompt of 2,048 tokens; beside one or two
    sequences 10 ms for 224 tokens that begin a prompt, and 12.5 for 192 after 6,100.

    Products take longer than reading the weights or computing alone would, a little less than one after the other.
    """

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        computing = 2.1e-5 * (work.num_decodes + work.prefill_tokens)
        products: float = (5.2e-3**1.15 + computing**1.15) ** (1 / 1.15)
        if not work.num_decodes:
            return 4e-4 + products + 9e-10 * work.prefill_pairs
        of_usual = work.decode_context / work.num_decodes / 2300
        reads: float = 5.5e-4 * (work.num_decodes**0.58 - 1.0) * of_usual
        return 4e-4 + products + reads + 2.4e-9 * work.prefill_pairs


def objectives(count: int) -> Iterator[Row]:
    """Yield a row for each kind of steps, workload, objective for gaps, and arm."""
    for steps, gpu, law in (("known", "H200", None), ("fitted", "H100", MeasuredLaw())):
        clusters = clusters_of(parser().parse_args(["--gpu", gpu, "--cluster", *ARMS]))
        for workload in RATES:
            for itl_ms in ITL_MS:
                held = {each.name: _goodput(_with_law(each, law), workload, itl_ms, count) for each in clusters}
                yield from _rows({"steps": steps, "workload": workload, "itl_ms": itl_ms}, held)


def _with_law(cluster: Cluster, law: StepLaw | None) -> Cluster:
    workers = [dataclasses.replace(worker, law=law) for worker in cluster.workers]
    return dataclasses.replace(cluster, workers=workers)


def _goodput(cluster: Cluster, workload: str, itl_ms: float, count: int) -> Goodput:
    points: list[tuple[float, float]] = []
    spec = TwinSpec(cluster.workers, cluster.calibration, cluster.policy, TTFT_MS[workload], itl_ms)
    for rate in RATES[workload]:
        runs = []
        for seed in range(NUM_RUNS):
            load = after_rest(parse_workload(workload).at(rate, count, seed))
            runs.append(Judged.of(TwinCluster(spec, seed).run(load, seed)))
        points.append((rate, float(np.mean([_pressure(run, TTFT_MS[workload], itl_ms) for run in runs]))))
        if points[-1][1] > 1.0:
            break
    return goodput_of(points)


def _pressure(run: Judged, ttft_ms: float, itl_ms: float) -> float:
    """Return the larger ratio of a 99th percentile to its objective."""
    ttft = np.minimum(run.ttft, FAILED_PRESSURE * ttft_ms)
    return float(max(np.percentile(ttft, 99) / ttft_ms, np.percentile(run.gaps, 99) / itl_ms))


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
