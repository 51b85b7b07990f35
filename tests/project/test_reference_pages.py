"""Declarations that reference pages are made from: counters, gauges and settings."""

import re
from typing import Any

import msgspec
import pytest

from splitserve.orchestration.spec.cluster_spec import SpecError, locations_of
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.orchestration.spec.expansion import Secrets, router_config
from splitserve.orchestration.spec.settings import spec_settings
from splitserve.protocol.config import EngineConfig, HttpLimits, LMCacheConfig, RouterConfig
from splitserve.protocol.counters import (
    Counter,
    Distribution,
    Gauge,
    Histogram,
    TierCounters,
    TierLoad,
    WorkerCounters,
    WorkerLoad,
    metrics_of,
)
from splitserve.protocol.engine_config import OPTION_GROUPS


def test_every_number_of_a_heartbeat_is_a_metric() -> None:
    for struct, others in ((WorkerLoad, {"tiers", "freeze_number"}), (TierLoad, {"name"})):
        assert set(metrics_of(struct)) == set(struct.__struct_fields__) - others


def test_what_the_engine_adds_to_are_counters_from_zero() -> None:
    for struct in (WorkerCounters, TierCounters):
        assert all(isinstance(metric, Counter | Histogram) for metric in metrics_of(struct).values())
        assert all(value in (0, Distribution()) for value in msgspec.structs.astuple(struct()))
    gauges = [name for name, metric in metrics_of(WorkerLoad).items() if isinstance(metric, Gauge)]
    assert "num_running" in gauges
    assert not set(gauges) & set(WorkerCounters.__struct_fields__)


def test_every_setting_says_what_it_means() -> None:
    settings = spec_settings()
    assert [each.location for each in settings if not each.description] == []
    assert len({each.location for each in settings}) == len(settings)


def test_every_field_of_an_engine_is_a_setting() -> None:
    assert {each.field for each in spec_settings() if each.field} == set(EngineConfig.__struct_fields__)


def test_every_field_of_a_router_and_of_its_parts_is_a_setting() -> None:
    """Or follows from other parts of the spec."""
    locations = {each.location: each for each in spec_settings()}
    assert {f"http.{field}" for field in HttpLimits.__struct_fields__} <= locations.keys()
    derived = {
        "model", "served_model_name", "membership_host", "membership_port", "on_awake_cores", "protocol", "http",
        "secret", "api_key", "admin_key", "name", "peers", "listener_fd",
    }  # fmt: skip
    for config, others in ((RouterConfig, derived), (LMCacheConfig, set[str]())):
        assert locations_of(config).keys() == set(config.__struct_fields__) - others
        assert set(locations_of(config).values()) <= locations.keys()


def test_values_of_a_spec_arrive_in_the_configs() -> None:
    given: dict[str, Any] = {
        "router": {"host": "::1", "port": 7, "policy": "least-loaded", "max_requests_in_flight": 3, "max_body_mib": 2},
        "http": {"max_headers": 5, "header_seconds": 1.5},
        "objectives": {"ttft_ms": 250.0, "tpot_ms": 20.0},
    }
    pools = [{"name": "mixed", "role": "mixed"}]
    spec = convert_spec({"model": {"path": "."}, "pools": pools, **given})
    config = router_config(spec, Secrets(), "127.0.0.1")
    found = msgspec.to_builtins(config)
    assert {field: found[field] for field in given["router"]} == given["router"]
    assert (config.ttft_objective_ms, config.tpot_objective_ms) == (250.0, 20.0)
    assert config.http == HttpLimits(max_headers=5, header_seconds=1.5)
    default = router_config(convert_spec({"model": {"path": "."}, "pools": pools}), Secrets(), "127.0.0.1")
    assert default == RouterConfig(model=".", served_model_name=default.served_model_name)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"http": {"max_headers": 0}}, "http.max_headers: must be between 1 and 65536, got 0"),
        ({"http": {"header_seconds": 0}}, "http.header_seconds: must be more than 0 and at most 86400, got 0"),
        ({"router": {"max_body_mib": 65}}, "router.max_body_mib: must be a whole number <= 64"),
        ({"objectives": {"ttft_ms": -1}}, "objectives.ttft_ms: must be a number >= 0"),
        ({"lmcache": {"chunk_tokens": 1 << 17}}, "lmcache.chunk_tokens: must be a whole number <= 65536"),
    ],
)
def test_ranges_are_those_of_the_declaration(part: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        convert_spec({"model": {"path": "."}, "pools": [{"name": "mixed", "role": "mixed"}], **part})


def test_options_are_settings_of_a_group_that_help_shows() -> None:
    for each in spec_settings():
        is_shown = each.setting.command != "serve" or each.setting.group in OPTION_GROUPS
        assert not each.setting.flags or is_shown, each.location
