"""Declarations that reference pages are made from: counters, gauges and settings."""

import msgspec

from splitserve.orchestration.spec.settings import spec_settings
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.counters import Counter, Gauge, TierCounters, TierLoad, WorkerCounters, WorkerLoad, metrics_of
from splitserve.protocol.engine_config import OPTION_GROUPS


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


def test_every_setting_says_what_it_means() -> None:
    settings = spec_settings()
    assert [each.place for each in settings if not each.description] == []
    assert len({each.place for each in settings}) == len(settings)


def test_every_field_of_an_engine_is_a_setting() -> None:
    assert {each.field for each in spec_settings() if each.field} == set(EngineConfig.__struct_fields__)


def test_options_are_settings_of_a_group_that_help_shows() -> None:
    for each in spec_settings():
        assert not each.setting.flags or each.setting.group in OPTION_GROUPS, each.place
