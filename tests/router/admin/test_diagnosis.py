"""The diagnosis: planted bottlenecks come first, healthy clusters raise no alarm."""

import itertools

import msgspec
import pytest

from overviews import PLANTED, broken, healthy, idle, large, replace, times, with_stages, with_workers
from splitserve.protocol.reports.overview import Objective, Overview, RouterFigures
from splitserve.router.admin.diagnosis.diagnose import MIN_SEVERITY, diagnose


@pytest.mark.parametrize(("name", "seed"), list(itertools.product(PLANTED, range(5))))
def test_a_planted_bottleneck_is_named_first(name: str, seed: int) -> None:
    diagnosis = diagnose(PLANTED[name](healthy(seed)))
    found = [(each.name, round(each.severity, 2)) for each in diagnosis.findings]
    assert found and found[0][0] == name, found
    first = diagnosis.findings[0]
    assert diagnosis.state == "limited" and diagnosis.sentence == first.sentence
    assert first.reasons and first.remedy and MIN_SEVERITY <= first.severity <= 1.0
    assert [each.severity for each in diagnosis.findings] == sorted(each.severity for each in diagnosis.findings)[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_cluster_raises_no_alarm(seed: int) -> None:
    for view in (healthy(seed), healthy(seed, 1, 1), healthy(seed, 24, 40)):
        diagnosis = diagnose(view)
        assert diagnosis.state == "healthy" and not diagnosis.findings, diagnosis.sentence
        assert "Nothing limits" in diagnosis.sentence


def test_an_idle_cluster_is_idle() -> None:
    assert diagnose(idle()).state == "idle"
    assert diagnose(Overview(router=RouterFigures())).state == "idle"


def test_a_cluster_without_workers_names_that() -> None:
    router = RouterFigures(is_ready=False, not_ready_reason="no decode worker is ready", num_waiting=3)
    diagnosis = diagnose(replace(healthy(), router=router))
    assert diagnosis.findings[0].name == "no_worker" and "no decode worker is ready" in diagnosis.sentence


def test_a_ready_cluster_without_prefill_workers_names_that_too() -> None:
    router = RouterFigures(is_ready=True, not_ready_reason="no prefill worker is ready")
    first = diagnose(replace(healthy(), router=router)).findings[0]
    assert first.name == "no_worker" and first.sentence == "Placement is restricted: no prefill worker is ready."


def test_a_pause_comes_before_what_it_brings_about() -> None:
    view = with_stages(with_workers(healthy(), "prefill", busy_share=0.99), prefill_queue=3.0)
    router = RouterFigures(pause_mode="keep", paused_seconds=12.0, num_waiting=2, num_queued=5)
    for reason in ("", "no prefill worker is ready"):
        paused = msgspec.structs.replace(router, is_ready=not reason, not_ready_reason=reason)
        diagnosis = diagnose(replace(view, objectives=[], router=paused))
        first, second, *_ = diagnosis.findings
        assert first.name == "paused" and "mode keep" in first.sentence and "12.0 s" in first.sentence
        assert first.reasons == ["7 requests wait for the end of the pause"] and "splitserve resume" in first.remedy
        assert second.severity < first.severity


def test_a_broken_worker_and_failures_are_named() -> None:
    names = [finding.name for finding in diagnose(broken()).findings]
    assert names[0] == "sick_worker" and "failures" in names


def test_waits_within_the_objective_are_no_bottleneck() -> None:
    view = PLANTED["prefill_short"](healthy())
    met = replace(view, objectives=[Objective(name="ttft", seconds=60.0, num=200, num_met=200)])
    assert diagnose(view).state == "limited" and diagnose(met).state == "healthy"


def test_a_slow_prefill_that_fills_decode_is_the_cause() -> None:
    """Room at decode is reserved before the prompt is computed: with prefill short, decode's KV is full, but empty."""
    view = with_workers(healthy(), "prefill", busy_share=0.99, waiting_tokens=90_000)
    view = with_workers(view, "decode", blocks_used=500, blocks_reserved=3500, blocks_cached=0, max_used_share=1.0)
    view = with_stages(replace(view, objectives=[]), grant_wait=3.0, prefill_queue=0.2)
    names = [finding.name for finding in diagnose(view).findings]
    assert names[0] == "prefill_short" and "decode_kv" in names


def test_an_overview_survives_its_way_as_json() -> None:
    view = large()
    found = msgspec.json.decode(msgspec.json.encode(replace(view, diagnosis=diagnose(view))), type=Overview)
    assert found.workers == view.workers and found.diagnosis.state == "healthy"


def test_a_missed_objective_without_another_cause_names_the_longest_stage() -> None:
    view = replace(healthy(), objectives=[Objective(name="ttft", seconds=0.01, num=200, num_met=0)])
    (found,) = diagnose(view).findings
    assert found.name == "missed_objective" and "of that time is prefill" in found.sentence


def test_requests_that_the_router_keeps_back_wait_for_prefill_or_for_decode() -> None:
    waiting = with_stages(replace(healthy(), objectives=[]), queue=2.0)
    busy = with_workers(waiting, "prefill", busy_share=0.95)
    assert diagnose(busy).findings[0].name == "prefill_short"
    full = with_workers(waiting, "decode", blocks_used=4000, max_used_share=1.0)
    assert diagnose(full).findings[0].name == "decode_kv"


@pytest.mark.parametrize(("num_handovers", "is_named"), [(9, False), (10, True)])
def test_the_first_handovers_of_a_link_are_no_slow_transport(num_handovers: int, is_named: bool) -> None:
    """They wait for the link to be joined."""
    view = healthy()
    slow = [replace(each, num=num_handovers, exposed=times(0.4)) for each in view.transports]
    named = [each.name for each in diagnose(replace(view, transports=slow)).findings]
    assert ("slow_transport" in named) is is_named
