"""A probe: one load at one rate on one arm, on a cluster of its own or on an endpoint that is there."""

import contextlib
import math
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from splitserve.benchmarks.common.stats import summarise
from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.goodput.clusters import Clusters
from splitserve.benchmarks.goodput.objectives import Objectives, Outcome
from splitserve.benchmarks.serving.conversations import (
    Prompts,
    TurnRecord,
    completion_body,
    run_in_processes,
    with_unsent,
)
from splitserve.benchmarks.serving.load import Endpoint
from splitserve.benchmarks.twin.calibration import measures_each_role, report_of
from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.doctor.http import Endpoint as AdminEndpoint
from splitserve.orchestration.spec.cluster_spec import ObjectivesSpec, RouterSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import ClusterReport, RequestSummary, RequestTrace, RequestTraces
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.step_model import StepModel
from splitserve.workloads.conversation import Conversation, Workload
from splitserve.workloads.named import Source

NUM_WARMUPS = 3
QUICKER = 4.0
LEAST_OF_A_PART = 120
"""Requests of each part of a short load, so that workers have fitted their step times to some hundred steps."""
MAX_SHORT_LOADS = 4
"""Short loads at most. Where steps are slow they have many sequences, and one load has few of them."""
HEARTBEATS_SECONDS = 2.5
"""Time in which the workers report the models that they have fitted."""
NUM_SLOWEST = 8
"""Requests whose timelines a probe keeps."""
SETTLED_SHARE = 0.1
"""Share of a load, from its begin, that isn't judged: the system fills up meanwhile."""
OFFERED_SHARE = 0.01
"""Difference of the offered rate from the asked one beyond which a probe says so."""

HELD_METRIC = "splitserve_held_requests_per_second"


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all probes of a comparison have in common."""

    source: Source
    objectives: Objectives
    num_requests: int  # of a probe, at least
    vocab_size: int
    engine: EngineConfig | None = None  # of clusters that probes start; None: there are endpoints only
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    num_client_processes: int = 1
    kill_seconds: float = 0.0  # between kills of a random worker; 0: none is killed
    urls: dict[str, str] = field(default_factory=dict)  # of endpoints that run already, by arm
    model_name: str = ""  # that they serve; "": they take requests without one
    api_key: str = ""
    min_seconds: float = 0.0  # of a probe's load: at a high rate the requests would end before batches are full

    def num_requests_at(self, rate: float) -> int:
        """Return the number of requests of a probe."""
        return max(self.num_requests, math.ceil(rate * self.min_seconds))


class ProbeResult(msgspec.Struct, kw_only=True):
    """Result of a probe, as it is kept in a file. Times in milliseconds."""

    arm: str
    rate: float
    seed: int
    offered_rate: float
    seconds: float
    ttft_ms: list[float | None]  # of each judged request, in the order of arrival; None: it failed
    gaps_ms: list[list[float | None]]  # None: a token that a failed request lacks
    figures: dict[str, Any]  # as of `splitserve bench serve`
    num_kills: int = 0
    num_short: int = 0  # judged requests whose answers had fewer tokens than asked, without an error
    stages: dict[str, dict[str, float]] = {}  # stages of TTFT: mean and p99
    slowest: list[dict[str, Any]] = []  # timelines, as of `splitserve trace`
    routes: dict[str, int] = {}  # of its last 1,024 requests, judged or not: "disaggregated prefill-0 decode-0"
    step_models: dict[str, StepModel] = {}  # by worker, after the load; none: they could not be read
    held: dict[str, float] = {}  # requests/s by serving mode, as `cost` predicts after the load; none: not known
    simulated: dict[
        str, float | None
    ] = {}  # the same percentiles on the arm's twin, and its goodput there, if it has one

    @property
    def outcome(self) -> Outcome:
        import numpy as np

        def times(values: Sequence[float | None]) -> Any:
            return np.array([np.inf if value is None else value for value in values], dtype=np.float64)

        gaps = tuple(times(values) for values in self.gaps_ms)
        return Outcome(times(self.ttft_ms), gaps, sum(value is None for value in self.ttft_ms))

    @property
    def kept_the_rate(self) -> bool:
        """Return whether the client offered the rate that it should."""
        return abs(self.offered_rate - self.rate) <= OFFERED_SHARE * self.rate + 1e-9


@dataclass(frozen=True, slots=True)
class Prober:
    """Runs the probes of a comparison."""

    setup: Setup
    clusters: Clusters

    def run(self, arm_name: str, arm: Arm | None, rate: float, seed: int) -> ProbeResult:
        """Offer the workload at ``rate`` to the arm; ``arm`` None: to the endpoint of that name.

        Raises :class:`SplitserveError` if the cluster doesn't start or its first requests fail.
        """
        with contextlib.ExitStack() as stack:
            cluster = None
            if arm is None:
                url, model = self.setup.urls[arm_name], self.setup.model_name
            else:
                cluster = stack.enter_context(self.clusters.running(arm, _spec(self.setup, arm)))
                url, model = cluster.url, cluster.spec.served_model_name
            endpoint = Endpoint(url, self.setup.api_key)
            prompts = Prompts(_vocabulary(self.setup), seed, _body(self.setup, model))
            _warm_up(endpoint, self.setup, prompts)
            workload = self.setup.source.at(rate, self.setup.num_requests_at(rate), seed)
            kills = stack.enter_context(_kills(cluster, self.setup.kill_seconds, seed))
            prefix = f"g{uuid.uuid4().hex[:12]}-"  # a cluster may have had other probes
            records = run_in_processes(endpoint, workload, prompts, self.setup.num_client_processes, prefix)
            result = result_of(arm_name, rate, seed, workload, records)
            result.num_kills = len(kills)
            traces = traces_of(url, self.setup.api_key, prefix)
            result.stages, result.slowest = _stages(traces), _slowest(traces)
            result.routes = Counter(_route(trace.summary) for trace in traces)
            with contextlib.suppress(SplitserveError):  # the endpoint isn't Splitserve's
                root = url.removesuffix("/v1")
                workers = report_of(root, self.setup.api_key).workers
                result.step_models = {worker.info.party.engine_id: worker.step_model for worker in workers}
                result.held = held_of(AdminEndpoint(root).get("/metrics").body.decode())
            return result

    def report_after_load(self, arm: Arm, rate: float, seed: int) -> ClusterReport:
        """Return the report of the arm's cluster after a short load, in which its workers fit their steps' times: half
        of its requests come at ``rate``, half at :data:`QUICKER` times that, so that large batches are among them. It
        is repeated until a worker of each role has fitted enough steps, :data:`MAX_SHORT_LOADS` times at most.

        Raises :class:`SplitserveError` if the cluster doesn't start or its first requests fail.
        """
        with self.clusters.running(arm, _spec(self.setup, arm)) as cluster:
            endpoint = Endpoint(cluster.url, self.setup.api_key)
            prompts = Prompts(_vocabulary(self.setup), seed, _body(self.setup, cluster.spec.served_model_name))
            _warm_up(endpoint, self.setup, prompts)
            num_requests = max(LEAST_OF_A_PART, self.setup.num_requests // 2)
            for load in range(MAX_SHORT_LOADS):
                for part, quicker in enumerate((1.0, QUICKER), start=2 * load):
                    workload = self.setup.source.at(quicker * rate, num_requests, seed + part)
                    run_in_processes(endpoint, workload, prompts, self.setup.num_client_processes, f"c{seed}-{part}-")
                time.sleep(HEARTBEATS_SECONDS)
                report = report_of(cluster.url, self.setup.api_key)
                if measures_each_role(report):
                    break
            return report


def result_of(arm_name: str, rate: float, seed: int, workload: Workload, turns: Sequence[TurnRecord]) -> ProbeResult:
    """Judge the turns that were due after the first :data:`SETTLED_SHARE` of them. Those that failed turns cut off
    count as failed."""
    everything = with_unsent(workload, turns)
    judged = everything[int(SETTLED_SHARE * len(everything)) :]
    records = [turn.record for turn in judged]
    outcome = Outcome.of(records, [turn.num_output_tokens for turn in judged])
    return ProbeResult(
        arm=arm_name,
        rate=rate,
        seed=seed,
        offered_rate=offered_rate(rate, workload, turns),
        seconds=max((turn.record.end_seconds for turn in turns), default=0.0),
        ttft_ms=[_finite(value) for value in outcome.ttft_ms.tolist()],
        gaps_ms=[[_finite(value) for value in gaps.tolist()] for gaps in outcome.gaps_ms],
        figures=summarise(records, None),
        num_short=sum(not turn.record.error and turn.record.output_tokens < turn.num_output_tokens for turn in judged),
    )


def offered_rate(rate: float, workload: Workload, turns: Sequence[TurnRecord]) -> float:
    """Return the rate at which conversations really began, in terms of the asked one: lower if the client was late."""
    begun = [turn.record for turn in turns if turn.number == 0]
    planned = workload.conversations[-1].start_seconds - workload.conversations[0].start_seconds
    taken = _span([record.sent_seconds for record in begun])
    return rate * planned / taken if planned and taken else rate


def _span(times: Sequence[float]) -> float:
    return max(times, default=0.0) - min(times, default=0.0)


def _finite(value: float) -> float | None:
    return round(value, 3) if value < float("inf") else None


def _spec(setup: Setup, arm: Arm) -> Any:
    assert setup.engine is not None, "an arm without an endpoint needs the engine's settings"
    return simple_spec(
        arm.engine(setup.engine),
        num_prefill=arm.num_prefill,
        num_decode=arm.num_decode,
        num_mixed=arm.num_mixed,
        router=RouterSpec(port=0, policy=arm.policy, request_log=False),
        objectives=ObjectivesSpec(ttft_ms=setup.objectives.ttft_ms, tpot_ms=setup.objectives.itl_ms),
    )


def _vocabulary(setup: Setup) -> range:
    first = min(10, setup.vocab_size // 2)  # special tokens are among the first ones
    return range(first, min(setup.vocab_size, 30_000))


def _body(setup: Setup, model: str) -> dict[str, Any]:
    body = completion_body(model, temperature=setup.temperature, top_p=setup.top_p)
    return body if model else {name: value for name, value in body.items() if name != "model"}


def _warm_up(endpoint: Endpoint, setup: Setup, prompts: Prompts) -> None:
    """Send the first requests one after the other. Raises :class:`SplitserveError` if one fails."""
    first = setup.source.at(1.0, NUM_WARMUPS, seed=-1)
    for number, conversation in enumerate(first.conversations[:NUM_WARMUPS]):
        alone = Workload("warm-up", (Conversation(f"warm-up-{number}", 0.0, conversation.turns[:1]),))
        [turn] = run_in_processes(endpoint, alone, prompts, 1)
        if turn.record.error:
            raise SplitserveError(f"the first request to {endpoint.base_url} failed: {turn.record.error}")


@contextlib.contextmanager
def _kills(cluster: LocalCluster | None, every_seconds: float, seed: int) -> Iterator[list[str]]:
    """Kill a random ready worker every ``every_seconds`` while the context lasts; yields the names of those killed."""
    killed: list[str] = []
    if cluster is None or not every_seconds:
        yield killed
        return
    chosen, ended = random.Random(seed), threading.Event()

    def kill() -> None:
        while not ended.wait(every_seconds):
            if cluster.ready:
                killed.append(chosen.choice(sorted(cluster.ready)))
                cluster.send_signal(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def traces_of(url: str, api_key: str, id_prefix: str) -> list[RequestTrace]:
    """Return the timelines of the last requests; none from an endpoint that isn't Splitserve's."""
    time.sleep(0.2)  # workers' last reports
    try:
        answer = AdminEndpoint(url.removesuffix("/v1"), api_key).get(f"/admin/requests/{id_prefix}")
        if answer.status != HTTPStatus.OK:
            return []
        return list(msgspec.json.decode(answer.body, type=RequestTraces).traces)
    except (SplitserveError, msgspec.DecodeError):
        return []


def held_of(metrics: str) -> dict[str, float]:
    """Return the rates that a router predicts to hold, by serving mode, from its metrics' text; none where it predicts
    none."""
    families = text_string_to_metric_families(metrics)
    samples = [sample for family in families if family.name == HELD_METRIC for sample in family.samples]
    return {sample.labels["mode"]: sample.value for sample in samples if not math.isnan(sample.value)}


def _route(summary: RequestSummary) -> str:
    """Return what was done with a request, and by which workers: one, if it did both phases."""
    workers = dict.fromkeys((summary.prefill, summary.decode))
    return " ".join((summary.actual, *filter(None, workers)))


def _stages(traces: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return mean and p99 of each stage of TTFT, in milliseconds."""
    import numpy as np

    names = list(dict.fromkeys(name for trace in traces for name in trace.summary.ttft_stages))
    found = {}
    for name in names:
        values = 1e3 * np.array([trace.summary.ttft_stages.get(name, 0.0) for trace in traces])
        found[name] = {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))}
    return found


def _slowest(traces: Sequence[Any]) -> list[dict[str, Any]]:
    ranked = sorted(traces, key=lambda trace: -(trace.summary.ttft_seconds or 0.0))
    return [msgspec.to_builtins(trace) for trace in ranked[:NUM_SLOWEST]]
