"""Conditional disaggregation on the twin, on workloads where it once was worse than always disaggregating."""

from dataclasses import replace

import numpy as np
import pytest

from splitserve.benchmarks.placement.measured_steps import H100Steps
from splitserve.benchmarks.placement.objectives import after_rest
from splitserve.benchmarks.twin.simulate import clusters_of, parser
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Party, Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.simulation.twin.models import Calibration, LinkModel
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.conversation import Workload
from splitserve.workloads.synthetic import Chats, Exact, make

CPU = StepModel(2.2e-3, 3.7e-4, 9.2e-7, 7.0e-5, 1.5e-7, 5000)
"""A small model on one core, as a decode worker fitted it."""
GPU = StepModel(5.7e-3, 1.5e-5, 4.5e-8, 2.0e-5, 1.0e-9, 5000)
"""An 8B model in bf16, on a GPU like an H100."""
ALWAYS, CONDITIONAL = "least-loaded", "cost"


def pair_of(steps: StepModel, device: str, num_tokens: int, layout: LayoutRecord) -> list[WorkerSetup]:
    """Return a prefill and a decode worker with room for ``num_tokens`` tokens, and 64 sequences."""
    engine = EngineConfig(model="twin", max_num_seqs=64).on(device)
    blocks = (num_tokens // layout.block_size,)
    return [
        WorkerSetup(f"{role}-0", role, engine, layout, blocks, 16_384, 1000, steps)
        for role in (Role.PREFILL, Role.DECODE)
    ]


def run(workers: list[WorkerSetup], policy: str, workload: Workload, ttft_ms: float, itl_ms: float) -> TwinResult:
    link = LinkModel(bytes_per_second=1e9 if workers[0].layout.block_size == 16 else 100e9)
    calibration = Calibration(steps={Role.MIXED: workers[0].model}, link=link)
    return TwinCluster(TwinSpec(workers, calibration, policy, ttft_ms, itl_ms)).run(workload)


def percentiles(result: TwinResult, percent: float) -> tuple[float, float]:
    """Return the percentiles of TTFT, and of the gaps between tokens, in milliseconds."""
    ttft = [turn.token_times[0] - turn.arrived_at for turn in result.turns]
    gaps = np.concatenate([np.diff(np.array(turn.token_times)) for turn in result.turns])
    return 1e3 * float(np.percentile(ttft, percent)), 1e3 * float(np.percentile(gaps, percent))


CORES = pair_of(CPU, "cpu", 100_000, LayoutRecord("twin", "w", "float32", 16, 2, 2, 64))
GPUS = pair_of(GPU, "cuda", 131_072, LayoutRecord("twin", "w", "bfloat16", 64, 32, 8, 128))


def test_the_spare_time_of_prefill_shortens_the_gaps_of_chats() -> None:
    """Short prompts leave prefill idle, and answers fill decode, whose gaps are near their objective."""
    chats = make(Chats(), 15.0, 150, seed=1)
    _, always = percentiles(run(CORES, ALWAYS, chats, 500.0, 60.0), 95)
    ttft, conditional = percentiles(run(CORES, CONDITIONAL, chats, 500.0, 60.0), 95)
    assert ttft < 500.0 and conditional < 0.85 * always


def test_a_pair_whose_link_was_never_measured_is_used() -> None:
    """At a load that the pair serves within its objectives: chunks of prompts beside 30 outputs would exceed them."""
    ttft, gaps = percentiles(run(GPUS, CONDITIONAL, make(Exact(2048, 512), 7.0, 160, seed=1), 500.0, 15.0), 99)
    assert ttft < 500.0 and gaps < 15.0


def test_outputs_that_decode_has_no_room_for_go_to_prefill() -> None:
    """Decode's batch and KV memory are full. Where all outputs wait for room there, more requests are refused."""

    def num_refused(policy: str, seed: int) -> int:
        result = run(GPUS, policy, make(Exact(2048, 512), 10.5, 160, seed=seed), 500.0, 30.0)
        return sum("first token is predicted" in turn.error for turn in result.turns)

    assert 0 < num_refused(CONDITIONAL, 2) < 0.75 * num_refused(ALWAYS, 2)
    assert num_refused(CONDITIONAL, 1) == 0 < num_refused(ALWAYS, 1)


def test_outputs_on_prefill_keep_the_99th_percentile_of_gaps_within_the_objective() -> None:
    """Chunks beside them make gaps near the objective, which the mean gap hides."""
    (cluster,) = clusters_of(parser().parse_args(["--gpu", "H200", "--cluster", "1P1D:cost"]))
    spec = TwinSpec(cluster.workers, cluster.calibration, cluster.policy, 500.0, 12.0)
    ttft, gaps = percentiles(TwinCluster(spec, 0).run(make(Exact(2048, 512), 8.0, 300, seed=0), 0), 99)
    assert ttft < 500.0 and gaps < 12.0


@pytest.mark.parametrize("arm", ["2M:prefix", "1P1D:cost"])
def test_prompts_beside_outputs_leave_gaps_within_the_objective(arm: str) -> None:
    """The deeper in its prompt, the shorter a chunk is. With 320 tokens each the last ones take twice as long as the
    first, and p99 of the gaps is over the objective."""
    (cluster,) = clusters_of(parser().parse_args(["--gpu", "H200", "--cluster", arm]))
    spec = TwinSpec(cluster.workers, cluster.calibration, cluster.policy, 1000.0, 12.0)
    ttft, gaps = percentiles(TwinCluster(spec, 0).run(make(Exact(8192, 64), 2.5, 200, seed=0), 0), 99)
    assert ttft < 1000.0 and gaps < 12.0


def test_without_objectives_outputs_stay_off_the_prefill_worker_of_a_young_cluster() -> None:
    """One that is drawn there makes prompts take 1.6 times as long, and their queue outlasts it."""
    requests = make(Exact(1024, 128), 26.0, 200, seed=2)
    always, _ = percentiles(run(GPUS, ALWAYS, requests, 0.0, 0.0), 99)
    conditional, _ = percentiles(run(GPUS, CONDITIONAL, requests, 0.0, 0.0), 99)
    assert conditional < 1.03 * always


def test_outputs_share_both_workers_before_decode_is_full() -> None:
    """At a rate whose outputs need more than the memory of decode, so that of ten prompts plain 1P1D has two late."""
    late = []
    for policy in (ALWAYS, CONDITIONAL):
        result = run(GPUS, policy, make(Exact(2048, 512), 9.0, 160, seed=1), 500.0, 30.0)
        late.append(np.mean([bool(turn.error) or turn.token_times[0] - turn.arrived_at > 0.5 for turn in result.turns]))
    assert late[0] > 0.2 and late[1] < 0.6 * late[0]


def test_a_load_that_comes_to_an_idle_cluster_keeps_outputs_off_prefill() -> None:
    """Prompts fill half of the prefill worker after a rest. One output there makes them take twice as long. Then some
    go to decode, and its outputs to prefill: a state that would last."""
    (cluster,) = clusters_of(parser().parse_args(["--gpu", "H200", "--cluster", "1P1D:cost"]))
    workload = after_rest(make(Exact(2048, 512), 10.0, 126, seed=0))
    times = []
    for policy in (ALWAYS, CONDITIONAL):
        spec = TwinSpec(cluster.workers, cluster.calibration, policy, 500.0, 15.0)
        times.append(percentiles(TwinCluster(spec, 0).run(workload, 0), 99))
    (always, _), (conditional, gaps) = times
    assert conditional < 1.1 * always and gaps < 15.0


def test_where_workers_fit_their_models_a_new_load_is_placed_as_well() -> None:
    """They begin with an estimate that is up to twice too slow, and learn from their steps. At this rate both come to
    do both phases: gaps are shorter, first tokens later, but in time."""
    (cluster,) = clusters_of(parser().parse_args(["--gpu", "H100", "--cluster", "1P1D:cost"]))
    workers = [replace(worker, law=H100Steps()) for worker in cluster.workers]
    load = after_rest(make(Exact(2048, 512), 13.0, 200, seed=3))
    times = []
    for policy in (ALWAYS, CONDITIONAL):
        twin = TwinCluster(TwinSpec(workers, cluster.calibration, policy, 500.0, 15.0), 3)
        times.append(percentiles(twin.run(load, 0), 99))
        decode = twin.workers[Party("decode-0", 1)]
        work = StepWork(50, 50 * 2300)
        assert decode.times.model.seconds(work) == pytest.approx(H100Steps().seconds(work), rel=0.03)
    (_, gaps), (conditional, conditional_gaps) = times
    assert conditional < 500.0 and conditional_gaps < min(gaps, 15.0)


@pytest.mark.parametrize(
    ("rate", "itl_ms", "is_shared"), [(14.2, 20.0, True), pytest.param(6.5, 10.0, False, marks=pytest.mark.slow)]
)
def test_both_workers_draw_long_outputs_where_that_holds_more(rate: float, itl_ms: float, is_shared: bool) -> None:
    """With loose objectives for gaps, two GPUs that read KV hold more than one; with strict ones prompts get in the
    way. Plain 1P1D draws tokens too late at the first rate, and holds the second."""
    (cluster,) = clusters_of(parser().parse_args(["--gpu", "H100", "--cluster", "1P1D:cost"]))
    workers = [replace(worker, law=H100Steps()) for worker in cluster.workers]
    load = after_rest(make(Exact(2048, 512), rate, 450, seed=0))
    found = {}
    for policy in (ALWAYS, CONDITIONAL):
        result = TwinCluster(TwinSpec(workers, cluster.calibration, policy, 500.0, itl_ms), 0).run(load, 0)
        num_refused = sum(bool(turn.error) for turn in result.turns)
        found[policy] = num_refused, *percentiles(result, 99)
    (refused, _, gaps), (conditional_refused, ttft, conditional_gaps) = found[ALWAYS], found[CONDITIONAL]
    assert conditional_refused == 0 and ttft < 500.0 and conditional_gaps < itl_ms
    assert (refused > 0 or gaps > itl_ms) == is_shared
