"""Policies that raise, or place what can't run: the requests are served nevertheless, or told why not."""

import logging

import pytest

from router_core import DECODE, MIXED, Core
from splitserve.protocol.messages.requests import Abort, DecodeRequest, LocalRequest, PrefillRequest
from splitserve.protocol.request import FinishReason, Role
from splitserve.router.placement.policies import Local, NoWorker, Placement, RequestShape, Snapshot, pair
from splitserve.router.requests import core as core_module
from splitserve.router.requests.effects import Deliver, SetTimer
from splitserve.router.requests.events import Timer, TimerKind


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Cores get the policy :func:`first_worker`; the log of its faults."""
    monkeypatch.setattr(core_module, "policy_by_name", lambda name: first_worker)
    caplog.set_level(logging.ERROR)
    return caplog


def first_worker(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Raises ValueError where there is no worker, and pairs the first one with itself if it may decode."""
    worker = min(snapshot.workers, key=lambda each: each.party.engine_id)
    return pair(worker, worker, "first") if worker.role is not Role.PREFILL else Local(worker.party)


def test_a_request_survives_a_policy_that_raises_after_a_failure(faults: pytest.LogCaptureFixture) -> None:
    core = Core(MIXED)
    request = core.submit()
    assert core.sent == [(MIXED, LocalRequest)]
    core.tokens(MIXED, request.state.key, 0, 7)
    core.lose(MIXED)
    assert "min() arg is an empty sequence" in faults.text
    [retry] = core.of(SetTimer)
    assert retry.timer == Timer(TimerKind.RETRY, "r")
    core.join(MIXED)
    assert core.sent == [(MIXED, Abort), (MIXED, LocalRequest)]
    core.tokens(MIXED, request.state.key, 1, 8, finish_reason=FinishReason.STOP)
    [deliver] = core.of(Deliver)
    assert deliver.update.ended and not core.core.requests


def test_a_worker_does_not_hand_over_to_itself(faults: pytest.LogCaptureFixture) -> None:
    core = Core(DECODE)
    core.submit()
    assert core.sent == [(DECODE, LocalRequest)] and "can't hand over to itself" in faults.text
    assert not {PrefillRequest, DecodeRequest} & {kind for _, kind in core.sent}


def test_a_client_is_told_of_the_fault_where_no_worker_can_help(faults: pytest.LogCaptureFixture) -> None:
    core = Core()
    found = core.core.placer.place(RequestShape(3, 5), core.now)
    assert isinstance(found, NoWorker) and "policy failed: ValueError: min()" in found.reason
    found = Core(DECODE).core.placer.place(RequestShape(3, 5), core.now)
    assert isinstance(found, NoWorker) and "both phases on one worker are `alone`" in found.reason
