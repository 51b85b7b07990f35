"""Bugs planted one at a time in the router: each is found by the words of a scenario over real sockets.

The scenarios pass without a planted bug; see ``router_scenarios.py``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import core_plants as plants
import router_scenarios as scenarios
from live_router import LiveRouter
from planted import Plant
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.request import Party
from splitserve.router.links import membership
from splitserve.router.links.membership import Membership
from splitserve.router.placement.breaker import Breaker
from splitserve.router.requests.state import Failure, RequestState

Scenario = Callable[[LiveRouter], Awaitable[None]]


def lost_workers_are_ready_at_once(patch: pytest.MonkeyPatch) -> None:
    original = Membership.heartbeat

    def heartbeat(self: Membership, sender: Party, *arguments: Any, **options: Any) -> WorkerState | None:
        before = original(self, sender, *arguments, **options)
        record = self.get(sender)
        if before is WorkerState.LOST and record is not None:
            record.state = WorkerState.READY
        return before

    patch.setattr(Membership, "heartbeat", heartbeat)


def the_messenger_is_blamed(patch: pytest.MonkeyPatch) -> None:
    def culprit(self: RequestState, sender: Party, failure: Failure) -> Party:
        return sender

    patch.setattr(RequestState, "_culprit", culprit)


def breakers_never_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breaker, "on_success", lambda self: None)


def live_workers_are_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "_holder", lambda *arguments: None)


def replaced_incarnations_return(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_mark_replaced", lambda self, party: None)


def heartbeats_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    original = Membership.heartbeat

    def heartbeat(self: Membership, sender: Party, *arguments: Any, **options: Any) -> WorkerState | None:
        record = self.get(sender)
        before = 0.0 if record is None else record.last_heard
        state = original(self, sender, *arguments, **options)
        if record is not None and state is not WorkerState.LOST:
            record.last_heard = before
        return state

    patch.setattr(Membership, "heartbeat", heartbeat)


PLANTS: dict[Plant, tuple[Scenario, str]] = {
    plants.retries_get_the_whole_deadline: (
        scenarios.a_retry_gets_what_is_left_of_the_deadline,
        "more than what was left",
    ),
    plants.orphans_are_not_aborted: (
        scenarios.a_worker_that_returns_hears_what_others_have_done_meanwhile,
        "is back, and wasn't told to abort",
    ),
    plants.charges_of_failed_attempts_stay: (scenarios.a_failed_attempt_is_charged_to_nobody, "is still charged"),
    lost_workers_are_ready_at_once: (
        scenarios.a_lost_worker_is_ready_with_its_link_and_not_before,
        "is ready without its link",
    ),
    plants.retries_start_over: (
        scenarios.a_retry_goes_on_after_the_delivered_tokens,
        "instead of the delivered tokens",
    ),
    plants.only_the_first_attempt_has_a_first_token: (
        scenarios.a_retried_prompt_is_computed_once_its_tokens_flow,
        "prompt tokens that it has computed",
    ),
    plants.aborts_name_the_next_attempt: (scenarios.the_survivor_of_a_failed_attempt_is_aborted, "these were aborted"),
    the_messenger_is_blamed: (scenarios.a_failed_handover_is_the_other_sides_fault, "is blamed for"),
    breakers_never_close: (scenarios.a_success_closes_the_breaker, "those before a success too"),
    live_workers_are_replaced: (scenarios.a_live_worker_keeps_its_place, "which is alive"),
    replaced_incarnations_return: (scenarios.a_new_incarnation_takes_requests_over_for_good, "took its place"),
    plants.draining_workers_get_requests: (scenarios.a_draining_worker_gets_no_requests, "drains"),
    heartbeats_are_not_noted: (scenarios.a_worker_whose_heartbeats_come_is_not_silent, "although its heartbeats come"),
}


NEEDS_SILENCE = scenarios.a_worker_that_returns_hears_what_others_have_done_meanwhile


def run(scenario: Scenario) -> None:
    async def play() -> None:
        router = LiveRouter(dead_after_seconds=1.5 if scenario is NEEDS_SILENCE else 60.0)
        try:
            await scenario(router)
        finally:
            router.close()

    asyncio.run(play())


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for scenario, _ in PLANTS.values()))
def test_scenario(scenario: Scenario) -> None:
    run(scenario)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    scenario, words = PLANTS[plant]
    with pytest.raises(AssertionError) as failure:
        run(scenario)
    assert words in str(failure.value), f"found by another check: {failure.value}"
