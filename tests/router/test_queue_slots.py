"""Requests that the queue doesn't try in vain: the slots that are left are reserved for others, or there are none to
decode in."""

from collections import Counter
from itertools import islice

import pytest

from full_worker import WORKER, FullWorker
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import NoWorker, Placed
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.events import Cancel
from splitserve.router.requests.queue.gate import TRY_MORE
from splitserve.router.requests.queue.tenants import Tenant

OTHER = Party("m1", 1)


def test_requests_of_a_tenant_for_which_only_reserved_slots_are_left_are_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = FullWorker(Tenant(name="a"), Tenant(name="b"), slots=8)
    full.submit("light", "batch", "b")
    for number in range(30):
        full.submit(f"heavy{number}", "batch")
    assert full.begun == ["light", *(f"heavy{number}" for number in range(6))], "one slot is the other tenant's"
    placed = Counter[str]()
    place = full.core.placer.first

    def first(request: ActiveRequest, now: float) -> Placed | NoWorker:
        placed[request.request_id] += 1
        return place(request, now)

    monkeypatch.setattr(full.core.placer, "first", first)
    full.handle(Cancel("heavy20"))
    full.core.gate.pump(full.now)
    assert not placed and full.try_more() == 0
    full.submit("other", "batch", "b")
    assert full.begun[-1] == "other" and set(placed) == {"other"}
    full.finish("heavy0")
    assert full.begun[-1] == "other" and set(placed) == {"other"}
    full.finish("light")
    assert full.begun[-1] == "heavy6" and "heavy6" in placed


def test_a_request_without_anything_to_decode_begins_though_only_reserved_slots_are_left_to_decode() -> None:
    full = FullWorker(Tenant(name="a"), Tenant(name="b"), slots=8)
    full.join(Party("p0", 1), role=Role.PREFILL, slots=8)
    for number in range(9):
        full.submit(f"heavy{number}", "batch")
    for number in range(2):
        full.submit(f"scored{number}", "batch", max_tokens=1, prompt_logprobs=0)
    assert full.begun[7:] == ["scored0", "scored1"]


@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_a_prompt_to_score_behind_many_requests_does_not_wait_for_slots_to_decode_in(tenants: str) -> None:
    full = FullWorker(*(Tenant(name=name) for name in tenants))
    full.lose(WORKER)
    full.join(OTHER, role=Role.DECODE)
    full.join(Party("p0", 1), role=Role.PREFILL, slots=2)
    full.submit("runs", "batch")
    full.token("runs")
    full.submit("scored0", "batch", max_tokens=1, prompt_logprobs=0)
    for number in range(60):
        full.submit(f"waits{number}", "batch", tenants[number % len(tenants)])
    full.submit("scored1", "batch", max_tokens=1, prompt_logprobs=0)
    full.submit("scored2", "batch", max_tokens=1, prompt_logprobs=0)
    assert full.begun == ["runs", "scored0", "scored1"] and full.try_more() == 0, "none waits for room at the other"
    full.handle(Cancel("scored0"))
    full.try_more()
    assert full.begun[3:] == ["scored2"]
    full.finish("runs")
    assert full.begun[4:] == [f"waits{len(tenants) - 1}"], "the others keep their order"


def full_to_decode(*tenants: Tenant) -> FullWorker:
    """Return a core whose workers that compute prompts and that decode have one request each: a prompt to score among
    them."""
    full = FullWorker(*tenants)
    full.lose(WORKER)
    full.join(OTHER, role=Role.DECODE)
    full.join(Party("p0", 1), role=Role.PREFILL)
    full.submit("runs", "batch")
    full.token("runs")
    full.submit("scored", "batch", max_tokens=1, prompt_logprobs=0)
    return full


def test_prompts_to_score_begin_by_the_shares_of_their_tenants() -> None:
    full = full_to_decode(Tenant(name="a"), Tenant(name="b"))
    for number in range(20):
        full.submit(f"waits{number}", "batch", "ab"[number % 2])
    for number in range(4):
        full.submit(f"a{number}", "batch", "a", max_tokens=1, prompt_logprobs=0)
    full.submit("b0", "batch", "b", max_tokens=1, prompt_logprobs=0)
    full.submit("urgent", "chat", "a", max_tokens=1, prompt_logprobs=0)
    for _ in range(4):
        full.handle(Cancel(full.begun[-1]))
    assert full.begun == ["runs", "scored", "urgent", "b0", "a0", "a1"]


@pytest.mark.parametrize("roles", ["mixed", "disaggregated"])
def test_no_turns_are_taken_for_a_prompt_to_score_while_no_worker_has_a_slot_for_it(roles: str) -> None:
    full = FullWorker() if roles == "mixed" else full_to_decode()
    for number in range(30):
        full.submit(f"waits{number}", "batch")
    full.submit("more", "batch", max_tokens=1, prompt_logprobs=0)
    full.now += 5.0  # the prompts of those that run are computed
    full.core.gate.pump(full.now)
    assert TRY_MORE not in full.core.timers() and "more" not in full.begun


def test_a_turn_for_prompts_to_score_does_not_look_at_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    full = full_to_decode(Tenant(name="a"), Tenant(name="b"))
    for number in range(300):
        full.submit(f"waits{number}", "batch", "ab"[number % 2])
    full.submit("more", "batch", max_tokens=1, prompt_logprobs=0)
    looked_at = list[ActiveRequest]()

    def is_prompt_only(request: ActiveRequest) -> bool:
        looked_at.append(request)
        return request.sampling.prompt_logprobs is not None

    monkeypatch.setattr(ActiveRequest, "is_prompt_only", property(is_prompt_only))
    full.core.handle(Cancel("scored"), full.now)
    assert full.requests["more"].state.placement is not None
    assert len({request.request_id for request in looked_at}) < 20


def test_turns_for_prompts_to_score_leave_the_place_of_the_others() -> None:
    full = full_to_decode()
    for number in range(9):
        full.submit(f"waits{number}", "batch")
    full.submit("more", "batch", max_tokens=1, prompt_logprobs=0)
    queue = full.core.gate.queue
    first = [request.request_id for request in islice(queue.in_turn(), 3)]
    assert [request.request_id for request in queue.in_turn(prompts_only=True)] == ["more"]
    assert [request.request_id for request in islice(queue.in_turn(), 3)] == [
        f"waits{(int(name.removeprefix('waits')) + 3) % 9}" for name in first
    ]
