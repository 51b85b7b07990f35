"""When a cluster's own step times calibrate a twin."""

import pytest

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.benchmarks.twin.calibration import MEASURED_STEPS, measures_each_role
from splitserve.protocol.cluster_report import ClusterReport, RequestRates, WorkerReport, WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role

RATES = RequestRates(
    seconds=10.0, num_in_flight=0, num_waiting=0, requests_per_second=0.0, failures_per_second=0.0,
    prompt_tokens_per_second=0.0, output_tokens_per_second=0.0, ttft_seconds_median=0.0, ttft_seconds_p99=0.0,
)  # fmt: skip
ENOUGH, FEW = MEASURED_STEPS, MEASURED_STEPS - 1


def worker(number: int, role: Role, num_steps: int) -> WorkerReport:
    info = WorkerInfo(Party(f"{role}-{number}", 1), role, "tcp://127.0.0.1:1", 1, DEFAULT_LAYOUT, 200, 8, 512, 1000)
    model = StepModel(base=1e-3, num_steps=num_steps)
    return WorkerReport(
        info=info, state=WorkerState.READY, silent_seconds=0.1, num_heartbeats=3, load=WorkerLoad(), links=[],
        step_model=model,
    )  # fmt: skip


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
    report = ClusterReport(
        version="1", machine="m", pid=1, clock_seconds=0.0, model="m", served_model_name="m", membership="",
        has_secret=False, heartbeat_seconds=1.0, dead_after_seconds=5.0, rates=RATES,
        workers=[worker(number, role, num_steps) for number, (role, num_steps) in enumerate(steps)],
    )  # fmt: skip
    assert measures_each_role(report) is is_enough
