"""Pauses, resets and drains by the router's core, without I/O."""

from types import SimpleNamespace
from typing import cast

import pytest

from router_core import DEADLINE_SECONDS, DECODE, MIXED, PREFILL, Core
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import Abort, DecodeRequest, PrefillRequest
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.router.admin.operations import Operations
from splitserve.router.links.fleet import Fleet
from splitserve.router.placement.prefix_view import PromptHashes
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import (
    Begun,
    CachesAreReset,
    Deliver,
    Effect,
    PauseIsFollowed,
    Refuse,
    Send,
    SetTimer,
)
from splitserve.router.requests.events import (
    FromWorker,
    NotSent,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    Submit,
    Timer,
    TimerKind,
)
from splitserve.router.requests.operations.drains import check_drain, worker_named
from splitserve.router.requests.operations.refusal import OperationRefusedError, RefusalReason


def pause(core: Core, mode: PauseMode) -> None:
    core.handle(PauseRequests(mode))


def frozen(core: Core) -> list[bool]:
    """The states that workers were sent."""
    return [effect.body.frozen for effect in core.of(Send) if isinstance(effect.body, SetFrozen)]


def deadline(core: Core) -> float:
    [at] = [effect.at for effect in core.of(SetTimer) if effect.timer == Timer(TimerKind.DEADLINE, "r")]
    return at


@pytest.mark.parametrize("mode", PauseMode)
def test_new_requests_wait_until_the_pause_ends(mode: PauseMode) -> None:
    core = Core(PREFILL, DECODE)
    pause(core, mode)
    core.submit()
    assert not core.of(Begun)
    core.now += 30.0
    core.handle(ResumeRequests())
    assert core.of(Begun) == [Begun("r")]


def test_a_pause_lets_requests_wait_longer_than_the_lack_of_a_worker() -> None:
    core = Core(PREFILL, DECODE)
    pause(core, PauseMode.WAIT)
    arrived_at = core.now
    core.submit()
    assert core.of(SetTimer) == [SetTimer(Timer(TimerKind.WAIT, "r"), arrived_at + DEADLINE_SECONDS)]
    core.now += DEADLINE_SECONDS
    core.fire(TimerKind.WAIT)
    [refused] = core.of(Refuse)
    assert "paused" in refused.reason


def test_abort_ends_running_requests_with_an_error() -> None:
    core = Core(PREFILL, DECODE)
    request = core.submit()
    core.tokens(PREFILL, request.state.key, 0, 7)
    pause(core, PauseMode.ABORT)
    [delivered] = core.of(Deliver)
    assert delivered.update.ended and delivered.update.failure.reason == "paused"
    assert set(core.sent) == {(DECODE, Abort), (PREFILL, Abort)}
    assert core.charges(DECODE).num_requests == 0


def test_wait_lets_running_requests_finish() -> None:
    core = Core(MIXED)
    request = core.submit()
    pause(core, PauseMode.WAIT)
    assert core.sent == []
    core.tokens(MIXED, request.state.key, 0, 7, 8, finish_reason=FinishReason.STOP)
    assert core.of(Deliver)[0].update.ended


def test_keep_freezes_each_worker_and_moves_the_deadline() -> None:
    core = Core(PREFILL, DECODE)
    request = core.submit()
    pause(core, PauseMode.KEEP)
    assert frozen(core) == [True] * 2
    assert {effect.to for effect in core.of(Send)} == {PREFILL, DECODE}
    pause(core, PauseMode.KEEP)
    assert core.effects == [PauseIsFollowed()], "pausing twice changes nothing"
    core.now += 1000.0
    core.handle(ResumeRequests())
    assert frozen(core) == [False] * 2
    assert deadline(core) == request.arrived_at + DEADLINE_SECONDS + 1000.0
    core.handle(ResumeRequests())
    assert core.effects == [PauseIsFollowed()], "resuming twice changes nothing"


def test_a_worker_that_comes_or_comes_back_is_frozen_before_it_gets_a_request() -> None:
    core = Core(MIXED)
    core.submit()
    pause(core, PauseMode.KEEP)
    core.lose(MIXED)
    other = Party("mixed-1", 4)
    sends = [effect.body for effect in core_join(core, other) if isinstance(effect, Send)]
    assert isinstance(sends[0], SetFrozen) and sends[0].frozen and len(sends) == 2, (
        "the lost worker's request goes on there, frozen"
    )
    core.handle(ResumeRequests())
    assert [effect.to for effect in core.of(Send)] == [other] and frozen(core) == [False]
    core_join(core, Party("mixed-2", 5))
    assert frozen(core) == [False], "it may have missed the end of the pause"


def core_join(core: Core, worker: Party) -> list[Effect]:
    return core.join(worker, Role.MIXED)


def test_a_freeze_that_a_link_does_not_take_is_sent_again() -> None:
    core = Core(MIXED)
    pause(core, PauseMode.KEEP)
    core.handle(NotSent(MIXED, SetFrozen(True, 1)))
    assert core.core.timers() == {Timer(TimerKind.FREEZE, "")}
    core.fire(TimerKind.FREEZE, "")
    assert frozen(core) == [True]
    assert not core.core.timers()


@pytest.mark.parametrize("after", [PauseMode.ABORT, PauseMode.WAIT])
def test_another_mode_ends_the_freeze(after: PauseMode) -> None:
    core = Core(MIXED)
    request = core.submit()
    pause(core, PauseMode.KEEP)
    core.now += 5.0
    pause(core, after)
    assert frozen(core) == [False]
    assert request.state.ended is (after is PauseMode.ABORT)
    assert core.core.pause.since == core.now - 5.0


class Seen:
    """An operator's view of a core, which hears heartbeats."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._operations = Operations(core.core, cast(Fleet, SimpleNamespace(membership=core.membership)), core.handle)

    def number(self) -> int:
        """The number that the workers were sent last."""
        return max(effect.body.number for effect in self._core.of(Send) if isinstance(effect.body, SetFrozen))

    def heartbeat(self, *workers: Party, frozen: bool, number: int) -> tuple[bool, list[str]]:
        """Return whether the state has settled by these workers' heartbeats, and which workers are frozen."""
        for worker in workers:
            load = WorkerLoad(frozen=int(frozen), freeze_number=number)
            self._core.membership.heartbeat(worker, load, self._core.now)
        state = self._operations.state()
        return state["settled"], state["workers_frozen"]


def test_a_pause_or_its_end_is_settled_once_the_workers_say_that_they_follow() -> None:
    core = Core(PREFILL, DECODE)
    core.membership.drain(PREFILL)  # it finishes its requests, unless it is frozen
    seen = Seen(core)
    assert seen.heartbeat(PREFILL, DECODE, frozen=False, number=0) == (True, [])
    pause(core, PauseMode.KEEP)
    number = seen.number()
    assert seen.heartbeat(DECODE, frozen=True, number=number) == (False, ["decode-0"])
    assert seen.heartbeat(PREFILL, frozen=True, number=number) == (True, ["decode-0", "prefill-0"])
    core.handle(ResumeRequests())
    number = seen.number()
    assert seen.heartbeat(PREFILL, frozen=False, number=number) == (False, ["decode-0"]), "decode's heartbeat is late"
    pause(core, PauseMode.WAIT)
    assert seen.heartbeat(frozen=False, number=number) == (False, ["decode-0"])
    assert seen.heartbeat(DECODE, frozen=False, number=number) == (True, [])


def test_a_heartbeat_of_an_earlier_freeze_settles_no_later_one() -> None:
    core = Core(MIXED)
    seen, earlier = Seen(core), 0
    for _ in range(2):
        pause(core, PauseMode.KEEP)
        number = seen.number()
        assert number > earlier
        assert seen.heartbeat(frozen=True, number=0) == (False, ["mixed-0"] if earlier else [])
        assert seen.heartbeat(MIXED, frozen=bool(earlier), number=earlier)[0] is False, "it was sent before"
        assert seen.heartbeat(MIXED, frozen=True, number=number) == (True, ["mixed-0"])
        earlier = number
        core.handle(ResumeRequests())
        assert seen.heartbeat(MIXED, frozen=True, number=earlier) == (False, ["mixed-0"])


def test_a_resumption_is_not_settled_by_a_worker_that_has_not_heard_of_the_freeze() -> None:
    core = Core(MIXED)
    seen = Seen(core)
    pause(core, PauseMode.KEEP)
    core.handle(ResumeRequests())
    number = seen.number()
    assert seen.heartbeat(MIXED, frozen=False, number=0)[0] is False
    assert seen.heartbeat(MIXED, frozen=False, number=number) == (True, [])


class TestResets:
    def test_it_is_over_when_each_worker_has_confirmed(self) -> None:
        core = Core(PREFILL, DECODE)
        core.handle(ResetCaches())
        [first, second] = core.of(Send)
        assert first.body == second.body == ResetPrefixCache(1) and not core.of(CachesAreReset)
        core.handle(FromWorker(PREFILL, PrefixCacheReset(1)))
        assert not core.of(CachesAreReset)
        core.handle(FromWorker(DECODE, PrefixCacheReset(0)))
        assert not core.of(CachesAreReset), "an earlier one"
        core.handle(FromWorker(DECODE, PrefixCacheReset(1)))
        assert core.of(CachesAreReset)

    def test_a_lost_worker_is_reset_before_its_next_request_and_nobody_waits_for_it(self) -> None:
        core = Core(PREFILL, DECODE)
        core.handle(ResetCaches())
        core.handle(FromWorker(PREFILL, PrefixCacheReset(1)))
        core.lose(DECODE)
        assert core.of(CachesAreReset) and list(core.core.resets.unconfirmed) == [DECODE]
        core.membership.heartbeat(DECODE, core.membership.get(DECODE).load, core.now)
        request = core.submit()
        assert not request.state.num_attempts
        sends = [effect.body for effect in core.join(DECODE) if isinstance(effect, Send)]
        assert [type(body) for body in sends] == [ResetPrefixCache, DecodeRequest, PrefillRequest]

    def test_a_new_incarnation_has_nothing_to_reset(self) -> None:
        core = Core(MIXED)
        core.handle(ResetCaches())
        core.lose(MIXED)
        assert core_join(core, Party(MIXED.engine_id, 99)) == [] and not core.core.resets.unconfirmed

    def test_all_are_reset_again_if_one_link_does_not_take_it(self) -> None:
        core = Core(PREFILL, DECODE)
        core.handle(ResetCaches())
        core.handle(NotSent(DECODE, ResetPrefixCache(1)))
        core.fire(TimerKind.CACHE_RESET, "")
        assert [effect.body for effect in core.of(Send)] == [ResetPrefixCache(2)] * 2

    def test_the_routers_own_index_forgets_and_does_not_learn_from_requests_of_before(self) -> None:
        core = Core(PREFILL, DECODE)
        prompt = list(range(60))
        request = ActiveRequest.new("r", prompt, SamplingParams(max_tokens=2), core.now)
        core.handle(Submit(request))
        view = core.core.placer._prefixes
        assert view.matches(PromptHashes(prompt))
        core.handle(ResetCaches())
        assert not view.matches(PromptHashes(prompt))
        core.tokens(DECODE, RequestKey("r"), 0, 5, 6, finish_reason=FinishReason.LENGTH)
        assert request.state.ended and not view.matches(PromptHashes(prompt))


def test_the_last_worker_of_a_role_drains_with_force_only() -> None:
    core = Core(PREFILL, DECODE)
    record = worker_named(core.membership, "decode-0")
    with pytest.raises(OperationRefusedError, match='"force": true') as refused:
        check_drain(core.membership, record, force=False, is_frozen=False)
    assert refused.value.reason is RefusalReason.LAST_WORKER
    check_drain(core.membership, record, force=True, is_frozen=False)
    with pytest.raises(OperationRefusedError, match="decode-0, prefill-0") as unknown:
        worker_named(core.membership, "decode-9")
    assert unknown.value.reason is RefusalReason.UNKNOWN_WORKER
    with pytest.raises(OperationRefusedError, match="resume first"):
        check_drain(core.membership, record, force=True, is_frozen=True)
