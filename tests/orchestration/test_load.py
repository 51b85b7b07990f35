"""The load of a cluster as `splitserve status` shows it."""

from cluster_reports import cluster_report, worker_report
from splitserve.orchestration.cli.load import load_of, load_text
from splitserve.protocol.cluster_report import RequestRates
from splitserve.protocol.counters import TierLoad, WorkerLoad
from splitserve.protocol.request import Role

RATES = RequestRates(
    seconds=10.0, num_in_flight=3, num_waiting=0, requests_per_second=2.5, failures_per_second=0.0,
    prompt_tokens_per_second=100.0, output_tokens_per_second=80.0, ttft_seconds_median=0.05, ttft_seconds_p99=0.2,
)  # fmt: skip


def test_the_table_has_role_load_kv_hits_and_tiers() -> None:
    tiers = [TierLoad(name="disk", slots=9, hits=7, available=0), TierLoad(name="lmcache", loaded_bytes=2 << 20)]
    load = WorkerLoad(
        num_running=4,
        blocks_referenced=40,
        blocks_quarantined=10,
        prompt_tokens=300,
        prefix_hit_tokens=100,
        tiers=tiers,
    )
    report = cluster_report(worker_report("decode-0", Role.DECODE, load=load), rates=RATES)
    rates, header, row = load_text(report).splitlines()
    assert rates == "3 requests in flight, 2.5/s, 80 output tokens/s over 10 s; TTFT 50 ms median, 200 ms p99"
    assert header.startswith("worker    role    state")
    assert row.split()[:8] == ["decode-0", "decode", "ready", "4", "0", "0", "25%", "25%"]
    assert row.endswith("disk down, 7 hits, lmcache up, 2.0 MiB loaded")


def test_a_router_that_does_not_answer_is_part_of_the_text() -> None:
    assert load_of("http://127.0.0.1:1").startswith("the load isn't known: ")
