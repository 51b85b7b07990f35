"""Placement policies and the membership table: pure, with hypothesis."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT
from splitserve.common.errors import ConfigError
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.placement.policies import PLACEMENT_POLICIES
from splitserve.protocol.request import Party, Role
from splitserve.router.links.membership import Membership
from splitserve.router.placement.policies import (
    Disaggregated,
    Local,
    NoWorker,
    RequestShape,
    Snapshot,
    context_limits,
    least_loaded,
    policy_by_name,
)
from worker_views import info, view

SHAPE = RequestShape(num_prompt_tokens=100, max_tokens=20)


def place(*workers, shape=SHAPE):
    return least_loaded(Snapshot(tuple(workers)), shape)


def test_the_least_loaded_of_each_pool_is_taken():
    placement = place(
        view("p0", Role.PREFILL, prefill_tokens=500),
        view("p1", Role.PREFILL, prefill_tokens=10),
        view("d0", Role.DECODE, num_requests=1),
        view("d1", Role.DECODE, num_requests=3),
    )
    assert placement == Disaggregated(prefill=Party("p1", 1), decode=Party("d0", 1))


def test_a_prefill_worker_must_hold_what_was_delivered_too():
    prefill, decode = view("p", Role.PREFILL, kv_capacity_tokens=105), view("d", Role.DECODE)
    assert isinstance(place(prefill, decode), Disaggregated)
    delivered = msgspec.structs.replace(SHAPE, num_output_tokens=10)
    assert not isinstance(place(prefill, decode, shape=delivered), Disaggregated)


def test_decode_load_is_the_scarcer_of_slots_and_memory():
    few_but_long = view("d0", Role.DECODE, num_requests=1, context_tokens=9_000)
    many_but_short = view("d1", Role.DECODE, num_requests=4, context_tokens=400)
    assert place(view("p", Role.PREFILL), few_but_long, many_but_short).decode == Party("d1", 1)


def test_an_idle_pool_takes_turns():
    assert place(
        view("p", Role.PREFILL), view("d0", Role.DECODE, num_placed=3), view("d1", Role.DECODE)
    ).decode == Party("d1", 1)


def test_a_cached_prefix_counts_as_work_not_missed():
    cached = view("p0", Role.PREFILL, prefill_tokens=50, prefix_match_tokens=90)
    assert place(cached, view("p1", Role.PREFILL), view("d", Role.DECODE)).prefill == Party("p0", 1)


def test_mixed_workers_serve_alone_and_beside_pairs():
    pair = (view("p", Role.PREFILL), view("d", Role.DECODE, num_requests=4))
    assert place(view("m", Role.MIXED)) == Local(worker=Party("m", 1))
    assert place(*pair, view("m", Role.MIXED, num_requests=6)).parties == (Party("p", 1), Party("d", 1))
    assert place(*pair, view("m", Role.MIXED, num_requests=1)) == Local(worker=Party("m", 1))
    assert place(pair[1], view("m", Role.MIXED, num_requests=9)) == Local(worker=Party("m", 1))


def test_reasons_name_what_is_missing():
    assert place() == NoWorker("no worker is ready")
    assert place(view("p", Role.PREFILL)) == NoWorker("no decode worker is ready")
    assert place(view("d", Role.DECODE)) == NoWorker("no prefill worker is ready")
    small = place(view("p", Role.PREFILL), view("d", Role.DECODE, max_model_len=110))
    words = "no ready decode worker takes a sequence of 120 tokens; the longest that they take has 110"
    assert small == NoWorker(words)
    assert isinstance(place(view("m", Role.MIXED, kv_capacity_tokens=119)), NoWorker)
    # A prefill worker holds the prompt only.
    assert isinstance(place(view("p", Role.PREFILL, kv_capacity_tokens=102), view("d", Role.DECODE)), Disaggregated)
    assert isinstance(place(view("p", Role.PREFILL, kv_capacity_tokens=101), view("d", Role.DECODE)), NoWorker)


def test_context_limits_are_those_of_the_workers_that_would_serve():
    def limits(*workers):
        return context_limits(Snapshot(workers))

    prefill = [view("p0", Role.PREFILL, max_model_len=500), view("p1", Role.PREFILL, max_model_len=300)]
    decode = [view("d0", Role.DECODE, kv_capacity_tokens=400), view("d1", Role.DECODE, max_model_len=200)]
    assert limits() is None and limits(*prefill) is None
    assert limits(*decode) == (400, 200), "decode workers alone can do both phases"
    assert limits(*prefill, *decode) == (400, 200)
    assert limits(prefill[1], decode[0]) == (300, 300)
    assert limits(*prefill, *decode, view("m", Role.MIXED, max_model_len=700)) == (700, 200)
    assert limits(prefill[0], view("m", Role.MIXED, max_model_len=70)) == (70, 70)


def test_an_unknown_policy_is_refused_by_name():
    assert all(callable(policy_by_name(name)) for name in PLACEMENT_POLICIES)
    assert policy_by_name("least-loaded") is least_loaded
    with pytest.raises(ConfigError, match=r"'best'.*least-loaded"):
        policy_by_name("best")


_VIEWS = st.lists(
    st.builds(
        view,
        st.sampled_from(["a", "b", "c", "d", "e"]),
        st.sampled_from(list(Role)),
        max_num_seqs=st.integers(1, 8),
        max_model_len=st.sampled_from([50, 120, 1000]),
        kv_capacity_tokens=st.sampled_from([0, 100, 120, 5000]),
        num_requests=st.integers(0, 9),
        prefill_tokens=st.integers(0, 900),
        context_tokens=st.integers(0, 9000),
        num_placed=st.integers(0, 3),
    ),
    max_size=6,
    unique_by=lambda worker: worker.party,
)


@given(_VIEWS)
def test_a_placement_names_fitting_workers_of_the_right_role_and_none_less_loaded(views):
    by_party = {worker.party: worker for worker in views}
    placement = place(*views)
    assert placement == place(*reversed(views))
    if isinstance(placement, NoWorker):
        assert placement.reason
        assert not [w for w in views if w.role is Role.MIXED and min(w.max_model_len, w.kv_capacity_tokens) >= 120]
        return
    roles = [by_party[party].role for party in placement.parties]
    assert roles == ([Role.MIXED] if isinstance(placement, Local) else [Role.PREFILL, Role.DECODE])
    assert by_party[placement.parties[-1]].context_tokens_limit >= 120
    assert by_party[placement.parties[0]].context_tokens_limit >= 102
    chosen = by_party[placement.parties[-1]]
    lighter = dataclasses.replace(chosen, party=Party("zz", 1), num_requests=0, context_tokens=0, max_num_seqs=9)
    if (chosen.num_requests or chosen.context_tokens) and chosen.num_requests / chosen.max_num_seqs > 0:
        assert place(*views, lighter).parties[-1] == lighter.party


# ---- membership ----


def table():
    return Membership(dead_after_seconds=5.0, forget_after_seconds=60.0)


def register(members, record, now=0.0):
    return members.register(record.party, record, now)


def test_a_worker_is_used_once_its_link_is_up_and_lost_when_silent():
    members, worker = table(), info()
    assert register(members, worker).must_dial
    assert not members.snapshot(0.0).workers and members.vocab_size() == 50
    members.link_up(worker.party)
    assert [each.party for each in members.snapshot(0.0).workers] == [worker.party]
    assert members.heartbeat(worker.party, WorkerLoad(num_running=3), 4.0) is WorkerState.READY
    assert members.snapshot(0.0).workers[0].load.num_running == 3
    assert members.expire(8.9) == [] and members.expire(9.1) == [worker.party]
    assert members.expire(9.2) == [] and not members.snapshot(0.0).workers
    assert members.heartbeat(worker.party, WorkerLoad(), 10.0) is WorkerState.LOST
    members.link_up(worker.party)
    assert members.snapshot(0.0).workers


def test_a_new_incarnation_replaces_the_old_one_for_good():
    members, old, new = table(), info(incarnation=1), info(incarnation=2)
    register(members, old)
    assert members.lose(old.party)
    registration = register(members, new)
    assert registration.refusal is None and registration.must_dial and members.get(old.party) is None
    assert register(members, old).refusal is not None
    assert members.heartbeat(old.party, WorkerLoad(), 1.0) is None
    assert members.get(new.party) is not None
    again = register(members, new)
    assert again.refusal is None and not again.must_dial


def test_workers_that_serve_something_else_are_refused_in_words():
    members = table()
    register(members, info("a"))
    other = msgspec.structs.replace(DEFAULT_LAYOUT, block_size=64)
    assert "block_size: 64 against 16" in register(members, info("b", layout=other)).refusal
    assert "vocab_size: 51 against worker a's 50" in register(members, info("b", vocab_size=51)).refusal
    assert "but is" in members.register(Party("x", 1), info("b"), 0.0).refusal
    # Once nobody of the old kind is left, another model may be served; a worker may change itself too.
    assert members.lose(Party("a", 1))
    assert register(members, info("a", incarnation=2, layout=other)).refusal is None
    assert members.leave(Party("a", 2)) and not members.leave(Party("a", 2))
    assert register(members, info("b", vocab_size=51)).refusal is None


def test_a_lost_worker_is_forgotten_and_may_register_again():
    members, worker = table(), info()
    register(members, worker)
    assert members.lose(worker.party) and not members.lose(worker.party)
    assert register(members, worker, 1.0).must_dial  # lost, so it needs a new link
    members.lose(worker.party)
    members.expire(62.0)
    assert members.heartbeat(worker.party, WorkerLoad(), 62.0) is None
    assert register(members, worker, 63.0).must_dial


def test_silence_is_excused_when_the_router_itself_stood_still():
    members, worker = table(), info()
    register(members, worker)
    members.excuse_silence(100.0)
    assert members.expire(101.0) == []


class MembershipMachine(RuleBasedStateMachine):
    """Random histories; charges must return to zero whatever happens to the workers meanwhile."""

    def __init__(self):
        super().__init__()
        self.members = table()
        self.now = 0.0
        self.charges = []

    parties = st.builds(Party, st.sampled_from(["a", "b", "c"]), st.integers(1, 3))

    @rule(party=parties)
    def register(self, party):
        role = {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.MIXED}[party.engine_id]
        record = info(party.engine_id, party.incarnation, role, max_model_len=1000, num_blocks=99)
        others = [each for each in self.members.records() if each.info.party.engine_id == party.engine_id]
        alive = [each for each in others if each.info.party != party and each.state is not WorkerState.LOST]
        registration = self.members.register(party, record, self.now)
        if alive:
            assert registration.refusal is not None, f"{party} has the place of one that is alive"
        taken = self.members.get(party)
        assert (taken is not None) == (registration.refusal is None)

    @rule(party=parties)
    def heartbeat(self, party):
        self.members.heartbeat(party, WorkerLoad(), self.now)

    @rule(party=parties)
    def link_up(self, party):
        self.members.link_up(party)

    @rule(party=parties)
    def lose(self, party):
        self.members.lose(party)

    @rule(party=parties)
    def leave(self, party):
        self.members.leave(party)

    @rule(seconds=st.sampled_from([0.5, 6.0, 70.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.members.expire(self.now)

    @rule(tokens=st.integers(1, 50))
    def charge(self, tokens):
        shape = RequestShape(tokens, 10)
        placement = least_loaded(self.members.snapshot(0.0), shape)
        if not isinstance(placement, NoWorker):
            self.charges.append(self.members.charge(placement, shape, self.now))

    @rule(index=st.integers(0, 5), first_token=st.booleans())
    def release(self, index, first_token):
        if index < len(self.charges):
            if first_token:
                self.charges[index].first_token_out(self.now)
            else:
                self.charges.pop(index).release(self.now)

    @invariant()
    def holds(self):
        self.members.check_invariants()

    def teardown(self):
        for charge in self.charges:
            charge.release(self.now)
            charge.release(self.now)
        for record in self.members.records():
            assert (record.num_requests, record.prefill_tokens, record.context_tokens) == (0, 0, 0)


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(max_examples=60)
