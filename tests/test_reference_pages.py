"""docs/reference: pages that are made from declarations in the code."""

from pathlib import Path

import msgspec

from splitserve.counters import Counter, Gauge, TierCounters, TierLoad, WorkerCounters, WorkerLoad, metrics_of
from splitserve.router.metrics_page import metrics_page

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def test_the_page_of_metrics_is_that_of_the_declarations() -> None:
    """Write it anew with: python -m splitserve.router.metrics_page > docs/reference/metrics.md"""
    assert (REFERENCE / "metrics.md").read_text(encoding="utf-8") == metrics_page()


def test_every_number_of_a_heartbeat_is_a_metric() -> None:
    for struct, others in ((WorkerLoad, {"tiers"}), (TierLoad, {"name"})):
        assert set(metrics_of(struct)) == set(struct.__struct_fields__) - others


def test_what_the_engine_adds_to_are_counters_from_zero() -> None:
    for struct in (WorkerCounters, TierCounters):
        assert all(isinstance(metric, Counter) for metric in metrics_of(struct).values())
        assert not any(msgspec.structs.astuple(struct()))
    gauges = [name for name, metric in metrics_of(WorkerLoad).items() if isinstance(metric, Gauge)]
    assert "num_running" in gauges
    assert not set(gauges) & set(WorkerCounters.__struct_fields__)
