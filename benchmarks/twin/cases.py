"""Cases of ``splitserve bench twin``: a load on an arrangement, measured twice and simulated. Plain data."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from splitserve.benchmarks.twin.residuals import Reads, StepTotals
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.worker import WorkerSetup

PACED, CPU = "paced", "cpu"
DEVICES = (PACED, CPU)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load. ``load``: its rate, as a share of the arrangement's capacity."""

    device: str
    arm: str
    workload: str
    load: float

    @property
    def name(self) -> str:
        """A name that can be a file's."""
        workload = self.workload.replace("/", "-").replace("+", "-shared-").replace(":", "-")
        return f"{self.device}_{self.arm.replace(':', '-').replace('@', '-chunks-')}_{workload}_{self.load:g}"


class Conditions(msgspec.Struct, kw_only=True):
    """Conditions of a run: a folder is continued only under the same ones."""

    seconds: float  # of each load
    shape: str
    max_num_seqs: int
    kv_memory: int
    steps: StepModel  # of paced devices
    seed: int
    num_repeats: int


class Measured(msgspec.Struct, kw_only=True):
    """One measured load. Times in seconds unless their names say otherwise."""

    case: Case
    repeat: int
    rate: float  # requests per second that were asked for
    offered_rate: float
    num_requests: int
    seed: int
    figures: dict[str, Any]  # as of `splitserve bench serve`
    stages: dict[str, float]  # mean of each stage of requests, by the router's timelines
    usual_stages: dict[str, float]  # their medians
    reads: list[Reads]  # of each hand-over
    router_ttft: float  # median TTFT by the router's timelines
    workers: list[WorkerSetup]  # with the models that they fitted
    step_totals: dict[Role, StepTotals]  # of this load
    step_errors: dict[Role, float]
    link_bytes_per_second: float
    num_cpus: int

    @property
    def name(self) -> str:
        return f"{self.case.name}_{self.repeat}"


def cases_of(
    devices: Sequence[str], arms: Sequence[str], workloads: Sequence[str], loads: Sequence[float]
) -> Iterator[Case]:
    """Yield all combinations; those of one arrangement follow each other."""
    for device in devices:
        for arm in arms:
            for workload in workloads:
                for load in loads:
                    yield Case(device=device, arm=arm, workload=workload, load=load)
