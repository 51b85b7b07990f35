"""The case ``arrangements``: conditional disaggregation against always and never, on the twin of two H200.

An 8B model's steps by a roofline: good for ranking, not for numbers. A request is good if its TTFT and its mean gap are
within the objectives. Without objectives each arm is compared with plain 1P1D.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.goodput.probe import SETTLED_SHARE
from splitserve.benchmarks.serving.conversations import with_unsent
from splitserve.benchmarks.twin.loads import records_of
from splitserve.benchmarks.twin.simulate import Cluster, clusters_of, parser
from splitserve.simulation.replay.results import percentile
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.workloads.conversation import Workload
from splitserve.workloads.named import parse_workload

Row: TypeAlias = dict[str, Any]

ARMS = ("1P1D:least-loaded", "1P1D:prefix", "2M@512:prefix", "2M@2048:prefix", "1P1D:cost")
FULL_RATES = {"1024/128": 48.0, "8192/64": 8.5, "2048/512": 13.8, "chats": 45.0}
"""Workloads, and the requests per second at which the best of the arms is full."""
LOADS = (0.3, 0.6, 0.8, 0.95)
TTFT_MS = 500.0
ITL_MS = (0.0, 8.0, 12.0, 15.0, 30.0)
"""Objectives for gaps; 0: no objectives, neither for TTFT."""
NUM_RUNS = 3
USUAL_REQUESTS = 400


@dataclass(frozen=True, slots=True)
class Judged:
    """A run as its clients saw it, without the time in which the system fills up; times in milliseconds."""

    ttft: NDArray[np.float64]  # of each request; infinite for one that failed
    mean_gaps: NDArray[np.float64]  # the same
    gaps: NDArray[np.float64]  # of all that didn't fail
    failed_share: float
    seconds: float  # in which they arrived
    local_share: float

    @classmethod
    def of(cls, workload: Workload, result: TwinResult) -> "Judged":
        """Judge the turns after the first :data:`SETTLED_SHARE` of them. Those that failed ones cut off count as
        failed."""
        turns = with_unsent(workload, records_of(result))
        records = [turn.record for turn in turns[int(SETTLED_SHARE * len(turns)) :]]
        num_local = sum(count for path, count in result.counts.items() if path.startswith("local"))
        failed = [bool(each.error) for each in records]
        return cls(
            failed_share=sum(failed) / len(failed),
            ttft=np.array([np.inf if each.error else 1e3 * each.ttft_seconds for each in records]),
            mean_gaps=np.array([np.inf if each.error else 1e3 * each.tpot_seconds for each in records]),
            gaps=np.concatenate([np.empty(0), *(1e3 * np.asarray(each.gaps) for each in records if not each.error)]),
            seconds=records[-1].sent_seconds - records[0].sent_seconds,
            local_share=num_local / max(1, result.counts.total()),
        )

    def figures(self, itl_ms: float) -> Row:
        """Return the figures of a row; goodput in requests per second, if there are objectives.

        Percentiles are those of requests that didn't fail, 0 if all did.
        """
        done = self.ttft[np.isfinite(self.ttft)]
        row = {
            "ttft_p50_ms": percentile(done, 50),
            "ttft_p99_ms": percentile(done, 99),
            "itl_p99_ms": percentile(self.gaps, 99),
            "failed_share": self.failed_share,
            "local_share": self.local_share,
        }
        if itl_ms:
            good = (self.ttft <= TTFT_MS) & (self.mean_gaps <= itl_ms)
            row["goodput"] = float(np.count_nonzero(good)) / self.seconds
        return row


def arrangements(count: int) -> Iterator[Row]:
    """Yield a row for each workload, load, objective and arm: means over runs with other arrivals."""
    clusters = clusters_of(parser().parse_args(["--gpu", "H200", "--cluster", *ARMS]))
    for workload, full_rate in FULL_RATES.items():
        for load in LOADS:
            others: dict[tuple[str, bool], list[Judged]] = {}  # their policies look at no objective for gaps
            for itl_ms in ITL_MS:
                rows = []
                for cluster in clusters:
                    key = (cluster.name, itl_ms > 0.0)
                    runs = others.get(key) or _runs(cluster, workload, load * full_rate, count, itl_ms)
                    if not parse_arm(cluster.name).is_conditional:
                        others[key] = runs
                    labels = {"workload": workload, "load": load, "itl_ms": itl_ms, "arm": cluster.name}
                    rows.append(labels | _mean([run.figures(itl_ms) for run in runs]))
                yield from _compared(rows)


def _runs(cluster: Cluster, workload: str, rate: float, count: int, itl_ms: float) -> list[Judged]:
    source, ttft_ms = parse_workload(workload), TTFT_MS if itl_ms else 0.0
    spec = TwinSpec(cluster.workers, cluster.calibration, cluster.policy, ttft_ms, itl_ms)
    workloads = [source.at(rate, count, seed) for seed in range(NUM_RUNS)]
    return [Judged.of(workload, TwinCluster(spec, seed).run(workload, seed)) for seed, workload in enumerate(workloads)]


def _mean(rows: Sequence[Row]) -> Row:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _compared(rows: list[Row]) -> list[Row]:
    """Add each row's ratio to the best of the others, or, without objectives, that of plain 1P1D's times to its own."""
    plain, *_ = rows
    for row in rows:
        others = [other["goodput"] for other in rows if other is not row and "goodput" in other]
        if others:
            row["goodput_ratio"] = row["goodput"] / max(others) if max(others) else float(row["goodput"] > 0.0)
        else:
            names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms")
            row["worst_of_plain"] = min(plain[name] / row[name] for name in names)
    return rows
