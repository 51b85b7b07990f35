"""Two routers' cores that exchange reports by hand: what operators ask one of them for holds in both."""

import pytest

from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache
from splitserve.router.peers import peers
from splitserve.router.requests.effects import CachesAreReset, Effect, PauseIsFollowed, Send
from splitserve.router.requests.events import (
    FromRouter,
    FromWorker,
    MeetRouters,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    RouterLost,
    TimerFired,
)
from two_routers import WORKERS, Router, deliver, two_routers

Pair = tuple[Router, Router]


@pytest.fixture
def pair() -> tuple[Router, Router]:
    return two_routers()


def test_a_pause_and_its_end_are_followed_at_once(pair: Pair) -> None:
    one, other = pair
    one.handle(PauseRequests(PauseMode.KEEP))
    deliver(one, other)
    assert other.mode is PauseMode.KEEP
    other.handle(ResumeRequests())
    deliver(other, one)
    assert one.mode is None


def test_a_resumption_holds_although_the_asked_router_has_not_heard_of_the_pause(pair: Pair) -> None:
    one, other = pair
    other.handle(PauseRequests(PauseMode.KEEP))
    one.now += 0.01
    one.handle(ResumeRequests())
    deliver(other, one)
    deliver(one, other)
    assert one.mode is other.mode is None


def test_two_operators_at_once_agree_in_the_end(pair: Pair) -> None:
    one, other = pair
    one.handle(PauseRequests(PauseMode.KEEP))
    other.handle(PauseRequests(PauseMode.WAIT))
    told, one.told = one.told, []
    deliver(other, one)
    for each in told:
        other.handle(FromRouter(one.party, each.body))
    assert one.mode is other.mode is PauseMode.WAIT


def test_a_router_that_starts_in_a_pause_is_paused(pair: Pair) -> None:
    one, _ = pair
    one.handle(PauseRequests(PauseMode.WAIT))
    fresh = Router("router-1", "router", incarnation=2, workers=())
    one.report()
    deliver(one, fresh)
    assert fresh.mode is PauseMode.WAIT


def test_a_reset_is_over_when_both_have_carried_it_out(pair: Pair) -> None:
    one, other = pair
    resets = [effect.body for effect in one.handle(ResetCaches()) if isinstance(effect, Send)]
    assert len(resets) == 2
    followed = [effect.body for effect in deliver(one, other) if isinstance(effect, Send)]
    assert [type(body) for body in followed] == [ResetPrefixCache] * 2
    assert not over(confirm(one)), "the other router has yet to do so"
    confirm(other)
    assert over(deliver(other, one))


def test_a_router_that_is_lost_is_not_awaited(pair: Pair) -> None:
    one, other = pair
    one.handle(ResetCaches())
    deliver(one, other)
    assert not over(confirm(one))
    assert over(one.handle(RouterLost(other.party)))


def test_a_router_that_starts_does_not_repeat_old_resets(pair: Pair) -> None:
    one, _ = pair
    one.handle(ResetCaches())
    confirm(one)
    fresh = Router("router-1", "router", incarnation=2)
    one.report()
    assert not [effect for effect in deliver(one, fresh) if isinstance(effect, Send)]


def test_a_reset_at_a_router_that_has_just_started_holds_in_the_others(pair: Pair) -> None:
    one, _ = pair
    for _ in range(3):
        one.handle(ResetCaches())
        confirm(one)
    fresh = Router("router-1", "router", incarnation=2)
    fresh.handle(MeetRouters())
    fresh.now = one.now = one.now + 0.01
    fresh.handle(ResetCaches())
    assert not over(confirm(fresh)), "the other router has not been heard yet"
    followed = [effect.body for effect in deliver(fresh, one) if isinstance(effect, Send)]
    assert [type(body) for body in followed] == [ResetPrefixCache] * 2
    confirm(one)
    assert over(deliver(one, fresh))


def test_two_resets_that_cross_are_both_carried_out(pair: Pair) -> None:
    """The second operator's reset also covers what the first router sent after its own."""
    one, other = pair
    one.handle(ResetCaches())
    confirm(one)
    other.now = one.now = one.now + 0.01
    other.handle(ResetCaches())
    told, one.told = one.told, []
    followed = [effect.body for effect in deliver(other, one) if isinstance(effect, Send)]
    assert [type(body) for body in followed] == [ResetPrefixCache] * 2
    for each in told:
        other.handle(FromRouter(one.party, each.body))
    assert not over(confirm(other))
    confirm(one)
    assert over(deliver(one, other))


def test_a_pause_and_its_end_are_over_when_the_other_router_follows(pair: Pair) -> None:
    one, other = pair
    for act, mode in ((PauseRequests(PauseMode.WAIT), PauseMode.WAIT), (ResumeRequests(), None)):
        assert not is_followed(one.handle(act)) and one.core.peers.names_behind == ["router-1"]
        one.report()
        deliver(one, other)
        assert other.mode is mode
        assert is_followed(deliver(other, one)) and not one.core.peers.names_behind


def test_a_report_from_before_the_pause_does_not_answer_it(pair: Pair) -> None:
    one, other = pair
    other.report()
    one.handle(PauseRequests(PauseMode.WAIT))
    assert not is_followed(deliver(other, one))


def test_a_pause_is_over_when_the_router_that_does_not_follow_is_lost(pair: Pair) -> None:
    one, other = pair
    one.handle(PauseRequests(PauseMode.WAIT))
    assert is_followed(one.handle(RouterLost(other.party)))


def test_a_router_that_has_just_started_awaits_those_that_it_has_not_heard(pair: Pair) -> None:
    one, _ = pair
    one.handle(PauseRequests(PauseMode.WAIT))
    fresh = Router("router-1", "router", incarnation=2)
    fresh.handle(MeetRouters())
    fresh.now += 0.01
    assert not is_followed(fresh.handle(ResumeRequests()))
    deliver(fresh, one)
    assert one.mode is None
    assert is_followed(deliver(one, fresh))


def test_a_router_that_starts_alone_awaits_the_others_for_the_time_of_a_silence() -> None:
    fresh = Router("router", "router-1")
    fresh.handle(MeetRouters())
    assert not is_followed(fresh.handle(PauseRequests(PauseMode.WAIT)))
    fresh.now += peers.LOST_SECONDS + 0.1
    assert is_followed(fresh.handle(TimerFired(peers.REPORT)))


def test_a_pause_is_over_when_the_router_that_does_not_follow_is_silent(pair: Pair) -> None:
    one, _ = pair
    one.handle(PauseRequests(PauseMode.WAIT))
    one.now += peers.LOST_SECONDS + 0.1
    assert is_followed(one.handle(TimerFired(peers.REPORT)))


def confirm(router: Router) -> list[Effect]:
    """Confirm the last reset for both workers."""
    number = router.core.resets._reset_id
    return [effect for each in WORKERS for effect in router.handle(FromWorker(each, PrefixCacheReset(number)))]


def over(effects: list[Effect]) -> bool:
    return any(isinstance(effect, CachesAreReset) for effect in effects)


def is_followed(effects: list[Effect]) -> bool:
    return any(isinstance(effect, PauseIsFollowed) for effect in effects)
