"""The load of a cluster as `splitserve status` shows it."""

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.orchestration.cli.load import load_of, load_text
from splitserve.protocol.cluster_report import ClusterReport, RequestRates, WorkerReport, WorkerState
from splitserve.protocol.counters import TierLoad, WorkerLoad
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.request import Party, Role

RATES = RequestRates(
    seconds=10.0, num_in_flight=3, num_waiting=0, requests_per_second=2.5, failures_per_second=0.0,
    prompt_tokens_per_second=100.0, output_tokens_per_second=80.0, ttft_seconds_median=0.05, ttft_seconds_p99=0.2,
)  # fmt: skip


def test_the_table_has_role_load_kv_hits_and_tiers() -> None:
    info = WorkerInfo(Party("decode-0", 1), Role.DECODE, "tcp://127.0.0.1:1", 1, DEFAULT_LAYOUT, 200, 8, 512, 1000)
    tiers = [TierLoad(name="lmcache", hits=7, available=0)]
    load = WorkerLoad(
        num_running=4,
        blocks_referenced=40,
        blocks_quarantined=10,
        prompt_tokens=300,
        prefix_hit_tokens=100,
        tiers=tiers,
    )
    worker = WorkerReport(info=info, state=WorkerState.READY, silent_seconds=0.1, num_heartbeats=3, load=load, links=[])
    report = ClusterReport(
        version="1", machine="m", pid=1, clock_seconds=0.0, model="m", served_model_name="m", membership="",
        has_secret=False, heartbeat_seconds=1.0, dead_after_seconds=5.0, workers=[worker], rates=RATES,
    )  # fmt: skip
    rates, header, row = load_text(report).splitlines()
    assert rates == "3 requests in flight, 2.5/s, 80 output tokens/s over 10 s; TTFT 50 ms median, 200 ms p99"
    assert header.startswith("worker    role    state")
    assert row.split() == ["decode-0", "decode", "ready", "4", "0", "0", "25%", "25%", "lmcache", "down,", "7", "hits"]


def test_a_router_that_does_not_answer_is_part_of_the_text() -> None:
    assert load_of("http://127.0.0.1:1").startswith("the load isn't known: ")
