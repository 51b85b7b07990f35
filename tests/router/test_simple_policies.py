"""Policies that predict nothing."""

from dataclasses import replace

import msgspec
import pytest

from splitserve.protocol.placement.policies import PLACEMENT_POLICIES
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import Disaggregated, RequestShape, Snapshot, policy_by_name
from splitserve.router.placement.simple import power_of_two, prefix, round_robin, session
from worker_views import view

SHAPE = RequestShape(num_prompt_tokens=100, max_tokens=20)


def pool(role, number, **fields):
    return [view(f"{role}-{index}", role, **fields) for index in range(number)]


def placed(policy, workers, shape=SHAPE):
    return policy(Snapshot(tuple(workers)), shape)


def test_turns_go_around():
    workers, names = pool(Role.MIXED, 3), []
    for _ in range(6):
        chosen = placed(round_robin, workers).worker
        names.append(chosen.engine_id)
        workers = [replace(w, num_placed=w.num_placed + (w.party == chosen)) for w in workers]
    assert names == ["mixed-0", "mixed-1", "mixed-2"] * 2


def test_a_conversation_stays_where_it_is_and_conversations_spread():
    workers = pool(Role.PREFILL, 4) + pool(Role.DECODE, 4)
    homes = {}
    for number in range(64):
        shape = msgspec.structs.replace(SHAPE, session=f"talk-{number}")
        home = placed(session, workers, shape)
        loaded = [replace(w, num_requests=7, num_placed=9) if w.party in home.parties else w for w in workers]
        assert placed(session, loaded, shape) == home
        homes[number] = home
        fewer = [w for w in workers if w.party != home.prefill]
        assert placed(session, fewer, shape).decode == home.decode, "only the lost half moves"
    assert len({home.prefill for home in homes.values()}) == len({home.decode for home in homes.values()}) == 4


def test_the_longest_prefix_counts_then_load():
    workers = [*pool(Role.DECODE, 1), *pool(Role.PREFILL, 3)]
    workers[2] = replace(workers[2], prefix_match_tokens=64, prefill_tokens=60)
    assert placed(prefix, workers).prefill == workers[2].party
    workers[3] = replace(workers[3], prefix_match_tokens=64)
    assert placed(prefix, workers).prefill == workers[3].party
    workers[1] = replace(workers[1], prefix_match_tokens=80, prefill_tokens=79)
    assert placed(prefix, workers).prefill == workers[1].party


@pytest.mark.parametrize(("matched", "queued"), [(48, 60), (80, 100)], ids=["a short part", "a long queue"])
def test_a_prefix_that_saves_too_little_gathers_nobody(matched, queued):
    """Less than half of the prompt, or less than the worker has to compute beyond another one."""
    workers = [*pool(Role.DECODE, 1), *pool(Role.PREFILL, 2)]
    workers[1] = replace(workers[1], prefix_match_tokens=matched, prefill_tokens=queued)
    assert placed(prefix, workers).prefill == workers[2].party


def test_the_better_of_two_is_never_the_worst_of_all():
    workers = [*pool(Role.DECODE, 1), *pool(Role.PREFILL, 5)]
    workers[3] = replace(workers[3], prefill_tokens=10**6)
    seen = set()
    for number in range(40):
        workers[0] = replace(workers[0], num_placed=number)
        seen.add(placed(power_of_two, workers).prefill)
    assert workers[3].party not in seen and len(seen) > 2


@pytest.mark.parametrize("name", PLACEMENT_POLICIES)
def test_every_policy_finds_the_only_pair_and_says_why_there_is_none(name):
    policy = policy_by_name(name)
    shape = msgspec.structs.replace(SHAPE, session="talk")
    only = Disaggregated(Party("p", 1), Party("d", 1))
    prefill, decode = view("p", Role.PREFILL, num_requests=4), view("d", Role.DECODE)
    long = msgspec.structs.replace(shape, num_prompt_tokens=10_000)
    if name != "cost":  # which may compute the prompt on the decode worker
        assert placed(policy, [prefill, decode], shape) == only
    assert "no decode worker" in placed(policy, [prefill], shape).reason
    assert "no ready" in placed(policy, [prefill, decode], long).reason
