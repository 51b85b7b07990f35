"""Views of workers are kept from one request to the next: they are true, and made anew only where something changed."""

import pytest

from router_core import MIXED, Core
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.links.worker_record import Elsewhere, WorkerRecord

ONE = MIXED


def workers(count: int) -> list[tuple[Party, Role]]:
    """Return half prefill and half decode workers."""
    return [(Party(f"{role}-{n}", 1), role) for n in range(count // 2) for role in (Role.PREFILL, Role.DECODE)]


def record_of(core: Core, party: Party = ONE) -> WorkerRecord:
    record = core.membership.get(party)
    assert record is not None
    return record


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_request_renews_the_views_of_its_own_workers_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many workers there are."""
    core = Core()
    for party, role in workers(count):
        core.join(party, role)
    core.core.placer.snapshot(core.submit("first").hashes, core.now)  # all views are made once
    made: list[Party] = []
    new_view = WorkerRecord._new_view

    def noted(record: WorkerRecord):
        made.append(record.info.party)
        return new_view(record)

    monkeypatch.setattr(WorkerRecord, "_new_view", noted)
    monkeypatch.setattr(WorkerRecord, "check_view", lambda _record: None)
    request = core.submit("second")
    assert made == []
    placement = request.state.placement
    assert placement is not None
    core.core.placer.snapshot(request.hashes, core.now)
    assert set(made) == set(placement.parties) and len(made) == 2


def test_a_view_shows_what_has_changed_since() -> None:
    core = Core(ONE)
    record = record_of(core)
    assert record.view(core.now).num_requests == 0
    request = core.submit("r")
    view = record.view(core.now, prefix_match_tokens=2)
    assert (view.num_requests, view.prefill_tokens, view.num_decoding, view.prefix_match_tokens) == (1, 3, 0, 2)
    core.tokens(ONE, request.state.key, 0, 7)
    view = record.view(core.now)
    assert (view.prefill_tokens, view.num_decoding, view.prefix_match_tokens) == (0, 1, 0)
    model = StepModel(0.01, num_steps=500)
    core.membership.heartbeat(ONE, WorkerLoad(num_waiting=3), core.now, step_model=model)
    view = record.view(core.now)
    assert view.load.num_waiting == 3 and view.step_model.base == 0.01
    core.membership.check_invariants()


def test_a_handed_over_request_leaves_its_prefill_worker_with_its_first_token() -> None:
    """It decodes on the other one alone: prefill has room for all of its batch."""
    prefill, decode = Party("prefill-0", 1), Party("decode-0", 1)
    core = Core()
    for party, role in workers(2):
        core.join(party, role)
    request = core.submit("r")
    seen = [
        (view.num_requests, view.num_decoding) for view in core.core.placer.snapshot(request.hashes, core.now).workers
    ]
    assert seen == [(1, 0), (1, 0)], "it decodes nowhere yet"
    before = record_of(core, decode).view(core.now)
    assert before.context_tokens and not before.decoding_tokens
    core.tokens(prefill, request.state.key, 0, 7)
    views = [record_of(core, party).view(core.now) for party in (prefill, decode)]
    assert [(view.num_requests, view.num_decoding) for view in views] == [(0, 0), (1, 1)]
    assert views[1].decoding_tokens == views[1].context_tokens > 0
    core.membership.check_invariants()


def test_requests_of_other_routers_are_seen_while_they_last() -> None:
    core = Core(ONE)
    record = record_of(core)
    assert core.membership.of_all_routers() == 1.0
    core.submit("r")
    record.elsewhere = Elsewhere(num_requests=4, prefill_tokens=10, queue_seconds=1.5)
    for _ in range(2):
        view = record.view(core.now)
        assert (view.num_requests, view.prefill_tokens) == (5, 13) and view.queue_seconds >= 1.5
    assert core.membership.of_all_routers() == 5.0
    core.membership.check_invariants()
    record.elsewhere = None
    assert record.view(core.now).num_requests == 1
    core.membership.check_invariants()


def test_a_change_that_the_view_misses_is_noticed() -> None:
    core = Core(ONE)
    record = record_of(core)
    record.view(core.now)
    record.num_requests += 1
    with pytest.raises(AssertionError, match="policies see"):
        core.membership.check_invariants()


def test_a_view_that_is_wrong_is_noticed() -> None:
    core = Core(ONE)
    record = record_of(core)
    record.view(core.now).max_num_seqs = 77
    with pytest.raises(AssertionError, match="policies see"):
        core.membership.check_invariants()
