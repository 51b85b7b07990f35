"""When a cluster's own step times calibrate a twin."""

import msgspec
import pytest

from cluster_reports import cluster_report, worker_report
from splitserve.benchmarks.twin.calibration import MEASURED_STEPS, measures_each_role, of_cluster
from splitserve.protocol.counters import TierLoad, WorkerLoad
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role

ENOUGH, FEW = MEASURED_STEPS, MEASURED_STEPS - 1


@pytest.mark.parametrize(
    ("steps", "is_enough"),
    [
        ([(Role.MIXED, FEW), (Role.MIXED, FEW)], False),
        ([(Role.MIXED, FEW), (Role.MIXED, ENOUGH)], True),
        ([(Role.PREFILL, FEW), (Role.DECODE, ENOUGH)], False),
        ([(Role.PREFILL, ENOUGH), (Role.DECODE, ENOUGH), (Role.DECODE, FEW)], True),
    ],
)
def test_one_worker_of_each_role_needs_enough_steps(steps: list[tuple[Role, int]], is_enough: bool) -> None:
    workers = [
        worker_report(f"{role}-{number}", role, step_model=StepModel(base=1e-3, num_steps=num_steps))
        for number, (role, num_steps) in enumerate(steps)
    ]
    assert measures_each_role(cluster_report(*workers)) is is_enough


def test_a_calibration_knows_the_ranks_of_its_workers() -> None:
    model = StepModel(base=1e-3, num_steps=ENOUGH)
    workers = [worker_report(f"{role}-0", role, step_model=model) for role in (Role.PREFILL, Role.DECODE)]
    assert of_cluster(cluster_report(*workers), "http://127.0.0.1:8000").num_ranks == 1
    wide = msgspec.structs.replace(workers[0].info.layout, tensor_parallel_size=2)
    workers[0] = msgspec.structs.replace(workers[0], info=msgspec.structs.replace(workers[0].info, layout=wide))
    assert of_cluster(cluster_report(*workers), "http://127.0.0.1:8000").num_ranks == 0


def test_copies_are_those_of_one_rank() -> None:
    """Its tiers report what all ranks have loaded, and copies of ranks run at once."""
    model = StepModel(base=1e-3, num_steps=ENOUGH)
    load = WorkerLoad(tiers=[TierLoad(name="host", loaded_bytes=8 << 30, load_seconds=2.0)])
    worker = worker_report("mixed-0", Role.MIXED, step_model=model, load=load)
    wide = msgspec.structs.replace(worker.info.layout, tensor_parallel_size=2)
    ranked = msgspec.structs.replace(worker, info=msgspec.structs.replace(worker.info, layout=wide))
    one, two = (of_cluster(cluster_report(each), "").copies.bytes_per_second for each in (worker, ranked))
    assert (one, two) == (4 << 30, 2 << 30)
