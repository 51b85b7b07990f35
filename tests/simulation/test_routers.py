"""Several routers on one port under faults: right tokens, policies that see the sum, acts that all routers follow."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule, num_schedules, router_schedule, run_schedule
from splitserve.protocol.messages.routers import RouterReport
from splitserve.protocol.request import Party
from splitserve.router.links.worker_record import Elsewhere, WorkerRecord
from splitserve.router.peers.peers import Peers
from splitserve.router.requests.events import PauseMode, PauseRequests, ResumeRequests
from splitserve.router.requests.operations.agreement import Agreement
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator

SHAPES = (
    Shape(prefill=2, decode=2, routers=2),
    Shape(prefill=0, decode=0, mixed=2, routers=3),
    Shape(decode=2, num_blocks=40, tier_slots=20, routers=2),
)
seeds = st.integers(0, 2**32)


@given(seed=seeds, shape=st.sampled_from(SHAPES))
@settings(max_examples=num_schedules(4))
def test_without_other_faults(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, shape=shape, faults=Faults()))
    assert all(len(client.output) for router in sim.routers.living for client in router.clients.values())


@given(seed=seeds, shape=st.sampled_from(SHAPES))
@settings(max_examples=num_schedules(4))
def test_routers_that_die_cost_their_own_streams_alone(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, shape=shape, faults=Faults(router_kills=3), num_requests=12))
    failed = [failure for router in sim.routers.living for failure in router.failures]
    assert not failed, "requests of other routers failed"


@given(seed=seeds, shape=st.sampled_from(SHAPES))
@settings(max_examples=num_schedules(4))
def test_an_operator_may_ask_any_of_them(seed: int, shape: Shape) -> None:
    run_schedule(Schedule(seed=seed, shape=shape, faults=Faults(pauses=2, resets=2)))


@given(seed=seeds)
@settings(max_examples=num_schedules(4))
def test_with_any_other_faults(seed: int) -> None:
    run_schedule(router_schedule(seed))


def test_a_worker_that_has_drained_while_it_was_frozen_leaves_once() -> None:
    """A router has started meanwhile, which it registers with as soon as it thaws."""
    sim = Simulator(0, Faults(), Shape(prefill=0, decode=0, mixed=2, routers=2))
    worker = sim.living("mixed-0")
    sim.at(0.3, lambda: sim.routers.kill(0.2))
    sim.at(0.499, lambda: sim.drain(worker, 0.0))
    sim.at(0.5, lambda: sim.freeze(worker, 3.0))
    sim.run(until=30.0)
    assert [line for line in sim.trace if f"{worker.party} leaves" in line] and sim.living("mixed-0").alive
    sim.check_end()


def test_a_resumption_that_only_a_dead_router_knew_is_asked_for_again() -> None:
    sim = Simulator(0, Faults(), Shape(prefill=0, decode=0, mixed=2, routers=2))
    one, other = sim.routers.living
    sim.at(1.0, lambda: one.handle(PauseRequests(PauseMode.KEEP)))
    sim.run(until=2.0)
    assert other.core.pause.is_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.routers, "any_living", lambda: other if other.alive else one)
        sim.routers.ask(ResumeRequests())
        sim.routers.kill(1.0)
        sim.run(until=3.0)
    assert not one.core.pause.is_on


# ---- planted bugs ----


def answers_do_not_wait_for_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peers, "names_behind", ())


def charges_of_a_lost_router_stay(patch: pytest.MonkeyPatch) -> None:
    def lose(self: Peers, party: Party, _now: float) -> None:
        self._known.pop(party.engine_id, None)

    patch.setattr(Peers, "lose", lose)


def policies_see_this_router_alone(patch: pytest.MonkeyPatch) -> None:
    original = WorkerRecord.view

    def view(self: WorkerRecord, now: float, prefix_match_tokens: int = 0) -> object:
        others, self.elsewhere = self.elsewhere, None
        try:
            return original(self, now, prefix_match_tokens)
        finally:
            self.elsewhere = others

    patch.setattr(WorkerRecord, "view", view)


def the_last_report_alone_counts(patch: pytest.MonkeyPatch) -> None:
    original = Peers.on_report

    def on_report(self: Peers, sender: Party, report: RouterReport, now: float) -> bool:
        is_news = original(self, sender, report, now)
        for record in self._membership.records():
            uses = [use for use in report.workers if use.worker == record.info.party]
            record.elsewhere = Elsewhere().plus(uses[0]) if uses else None
        return is_news

    patch.setattr(Peers, "on_report", on_report)
    patch.setattr(Peers, "check_invariants", lambda self: None)


def pauses_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agreement, "_follow", lambda self, report, now: None)


def the_others_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peers, "have_reset", property(lambda self: self.reset_done >= self.reset))


def ended_requests_are_reported(patch: pytest.MonkeyPatch) -> None:
    original = Peers._uses

    def uses(self: Peers, now: float) -> object:
        kept = getattr(self, "kept", {})
        kept |= {use.worker: use for use in original(self, now)}
        self.kept = kept  # type: ignore[attr-defined]
        return iter(kept.values())

    patch.setattr(Peers, "_uses", uses)


PLANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[Faults, str]] = {
    charges_of_a_lost_router_stay: (Faults(router_kills=3), "of other routers, which report"),
    policies_see_this_router_alone: (Faults(), "policies see"),
    the_last_report_alone_counts: (Faults(), "policies see"),
    pauses_are_not_followed: (Faults(pauses=2), "does not follow the pause"),
    answers_do_not_wait_for_the_others: (Faults(pauses=2), "operators are answered before"),
    the_others_are_not_awaited: (Faults(resets=3), "have carried it out"),
    ended_requests_are_reported: (Faults(), "is still charged for other routers"),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    faults, words = PLANTS[plant]
    for seed in range(40):
        try:
            run_schedule(Schedule(seed=seed, shape=SHAPES[seed % 3], faults=faults))
        except AssertionError as error:
            assert words in str(error), f"found by another check: {error}"
            return
    pytest.fail("the bug isn't found in 40 schedules")
