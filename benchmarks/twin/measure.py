"""One measured load of ``splitserve bench twin``, in a process of its own: ``python -m ... ORDER``, an :class:`Order`.

The process and its cluster stay on the cores that the order names.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from splitserve.benchmarks.common.stats import summarise
from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.goodput.probe import offered_rate, traces_of
from splitserve.benchmarks.serving.conversations import Prompts, completion_body, run_in_processes
from splitserve.benchmarks.serving.load import Endpoint
from splitserve.benchmarks.twin.calibration import report_of
from splitserve.benchmarks.twin.cases import PACED, Case, Conditions, Measured
from splitserve.benchmarks.twin.paced import ENTRY, STEPS_VARIABLE
from splitserve.benchmarks.twin.residuals import Reads, StepTotals
from splitserve.benchmarks.twin.setups import setups_of_cluster
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.cluster_spec import RouterSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import ClusterReport, RequestTrace
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration
from splitserve.workloads.conversation import Conversation, Workload
from splitserve.workloads.named import parse_workload

WARM_UPS = 4
POLL_SECONDS = 0.1
REPORT_SECONDS = 30.0
"""Time in which each worker must send a heartbeat."""
VOCABULARY = range(20, 1000)


class Order(msgspec.Struct, kw_only=True):
    """Order to measure one load."""

    case: Case
    repeat: int
    rate: float
    conditions: Conditions
    model: str  # path of the checkpoint
    cpus: list[int]  # none: all
    result: str  # path of the file to write


def main(argv: list[str]) -> int:
    """Measure what the order says, and write its result, whole or not at all."""
    order = msgspec.json.decode(argv[0], type=Order)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    try:
        measured = measure(order)
    except SplitserveError as error:
        print(f"{order.case.name}: {error}", file=sys.stderr)
        return 1
    file = Path(order.result)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1))
    new.replace(file)
    return 0


def measure(order: Order) -> Measured:
    """Start the cluster, offer the load, stop the cluster. Raises :class:`SplitserveError`."""
    case, conditions = order.case, order.conditions
    arm, source = parse_arm(case.arm), parse_workload(case.workload)
    seed = conditions.seed + order.repeat
    num_requests = max(WARM_UPS, round(order.rate * conditions.seconds))
    workload = source.at(order.rate, num_requests, seed)
    engine = EngineConfig(
        model=order.model,
        device="cpu",
        threads=1,
        max_num_seqs=conditions.max_num_seqs,
        kv_memory_bytes=conditions.kv_memory,
    )
    spec = simple_spec(
        arm.engine(engine),
        num_prefill=arm.num_prefill,
        num_decode=arm.num_decode,
        num_mixed=arm.num_mixed,
        router=RouterSpec(port=0, policy=arm.policy, request_log=False),
    )
    is_paced = case.device == PACED
    environment = {STEPS_VARIABLE: msgspec.json.encode(conditions.steps).decode()} if is_paced else {}
    entries = Entries(worker=ENTRY) if is_paced else Entries()
    with LocalCluster(spec, log_level="warning", entries=entries, environment=environment) as cluster:
        endpoint = Endpoint(cluster.url, "")
        prompts = Prompts(VOCABULARY, seed, completion_body(cluster.spec.served_model_name))
        _warm_up(endpoint, prompts)
        before = _step_totals(_fresh_report(cluster.url))
        turns = run_in_processes(endpoint, workload, prompts, 1, f"t{seed}-")
        traces = traces_of(cluster.url, "", f"t{seed}-")
        report = _fresh_report(cluster.url)
    records = [turn.record for turn in turns]
    return Measured(
        case=case,
        repeat=order.repeat,
        rate=order.rate,
        offered_rate=offered_rate(order.rate, workload, turns),
        num_requests=num_requests,
        seed=seed,
        figures=summarise(records, None),
        stages=_stages(traces, statistics.fmean),
        usual_stages=_stages(traces, statistics.median),
        reads=_reads(traces),
        router_ttft=statistics.median([t.summary.ttft_seconds for t in traces if t.summary.ttft_seconds] or [0.0]),
        workers=setups_of_cluster(report, Calibration(steps={Role.MIXED: StepModel()})),
        step_totals={role: totals - before[role] for role, totals in _step_totals(report).items()},
        step_errors={worker.info.role: worker.load.step_error for worker in report.workers},
        link_bytes_per_second=_link_rate(report),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def _fresh_report(url: str) -> ClusterReport:
    """Return the cluster's report once each worker has sent another heartbeat, with its last fits and counts. Raises
    :class:`SplitserveError` if one sends none."""
    time.sleep(2 * POLL_SECONDS)  # heartbeats that are on their way
    seen = {worker.info.party: worker.num_heartbeats for worker in report_of(url, "").workers}
    ends_at = time.monotonic() + REPORT_SECONDS
    while time.monotonic() < ends_at:
        report = report_of(url, "")
        if all(worker.num_heartbeats > seen[worker.info.party] for worker in report.workers):
            return report
        time.sleep(POLL_SECONDS)
    raise SplitserveError(f"a worker of {url} has sent no heartbeat for {REPORT_SECONDS:.0f} s")


def _step_totals(report: ClusterReport) -> dict[Role, StepTotals]:
    """Return the sums over the steps of all workers with a role, from their start on."""
    found: dict[Role, StepTotals] = {}
    for worker in report.workers:
        load, role = worker.load, worker.info.role
        own = StepTotals(load.steps, load.step_seconds, load.step_tokens.total)
        found[role] = found.get(role, StepTotals()) + own
    return found


def _link_rate(report: ClusterReport) -> float:
    rates = [link.bytes_per_second for worker in report.workers for link in worker.links if link.bytes_per_second > 0]
    return statistics.median(rates) if rates else 0.0


def _reads(traces: list[RequestTrace]) -> list[Reads]:
    found = (trace.summary for trace in traces)
    return [
        (each.handover_bytes, each.handover_reads, each.handover_read_seconds) for each in found if each.handover_bytes
    ]


def _stages(traces: list[RequestTrace], middle: Callable[[list[float]], float]) -> dict[str, float]:
    by_stage: dict[str, list[float]] = {}
    for trace in traces:
        for stages in (trace.summary.ttft_stages, trace.summary.handover_stages):
            for name, seconds in stages.items():
                by_stage.setdefault(name, []).append(seconds)
    return {name: middle(values) for name, values in by_stage.items()}


def _warm_up(endpoint: Endpoint, prompts: Prompts) -> None:
    """Send a few requests one after the other. Raises :class:`SplitserveError` if one fails."""
    for number, conversation in enumerate(parse_workload("64/4").at(5.0, WARM_UPS, -1).conversations):
        alone = Workload("warm-up", (Conversation(f"warm-up-{number}", 0.0, conversation.turns),))
        [turn] = run_in_processes(endpoint, alone, prompts, 1)
        if turn.record.error:
            raise SplitserveError(f"the first request failed: {turn.record.error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
