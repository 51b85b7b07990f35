"""Loads on the twin, as records like those of a real load: the same code computes the figures of both."""

from collections.abc import Callable, Sequence

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.goodput.objectives import Objectives
from splitserve.benchmarks.goodput.probe import ProbeResult, result_of
from splitserve.benchmarks.serving.conversations import TurnRecord
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.named import Source

Workers = Callable[[Arm], Sequence[WorkerSetup]]


def records_of(result: TwinResult) -> list[TurnRecord]:
    """Return the records that a client would have made."""
    return [
        TurnRecord(
            conversation=turn.conversation,
            number=turn.number,
            num_new_tokens=turn.num_prompt_tokens,
            num_output_tokens=turn.num_output_tokens,
            record=RequestRecord(
                due_seconds=turn.arrived_at,
                sent_seconds=turn.arrived_at,
                end_seconds=turn.ended_at,
                chunk_seconds=turn.token_times,
                chunk_tokens=bytearray(b"\x01") * len(turn.token_times),
                input_tokens=turn.num_prompt_tokens,
                output_tokens=len(turn.token_times),
                cached_tokens=turn.num_cached_tokens,
                finish_reason="" if turn.error else "length",
                error=turn.error,
            ),
        )
        for turn in result.turns
    ]


class TwinProber:
    """Prober of arms on the twin, as :mod:`splitserve.benchmarks.goodput.comparison` calls it."""

    def __init__(
        self,
        workers: Workers,
        calibration: Calibration,
        source: Source,
        objectives: Objectives,
        num_requests: Callable[[float], int],
    ) -> None:
        """``num_requests``: of a load, by its rate."""
        self._workers = workers
        self._calibration = calibration
        self._source = source
        self._objectives = objectives
        self._num_requests = num_requests

    def __call__(self, name: str, arm: Arm | None, rate: float, seed: int) -> ProbeResult:
        """Run the workload at ``rate`` on the arm's twin."""
        assert arm is not None, "an endpoint has no twin"
        spec = TwinSpec(
            workers=self._workers(arm),
            calibration=self._calibration,
            policy=arm.policy,
            ttft_ms=self._objectives.ttft_ms,
            tpot_ms=self._objectives.itl_ms,
        )
        workload = self._source.at(rate, self._num_requests(rate), seed)
        result = TwinCluster(spec, seed).run(workload, seed)
        return result_of(name, rate, seed, workload, records_of(result))
