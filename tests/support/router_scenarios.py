"""A router's answers to failed attempts and to workers that come and go, seen by its workers. Not a test module.

Each scenario is a coroutine on a router of its own; the words of its checks say which one failed.
"""

import asyncio
import time
from collections.abc import Sequence

from live_router import LiveRouter, WorkerByHand, aborted, until
from splitserve.benchmarks.router.instant_worker import InstantWorker
from splitserve.benchmarks.router.worker_script import Reply, Request, default_script
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.membership import Draining, Heartbeat, RegisterRefused
from splitserve.protocol.messages.requests import (
    DecodeRequest,
    FailureCode,
    LocalRequest,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import Local, NoWorker, RequestShape
from splitserve.router.requests.state import RequestPhase

SHAPE = RequestShape(num_prompt_tokens=3, max_tokens=4)
TRY_SECONDS = 0.3


def silent(body: Request) -> Sequence[Reply]:
    return []


def failing(body: Request) -> Sequence[Reply]:
    return [Reply(RequestFailed(body.key, FailureCode.INTERNAL, "planted"))]


def failing_later(body: Request) -> Sequence[Reply]:
    return [Reply(RequestFailed(body.key, FailureCode.INTERNAL, "planted"), TRY_SECONDS)]


def failing_after_two_tokens(body: Request) -> Sequence[Reply]:
    return [Reply(StepTokens([TokenDelta(body.key, 0, [7, 8])])), *failing(body)]


async def a_retry_gets_what_is_left_of_the_deadline(router: LiveRouter) -> None:
    first, second = await router.start("m0", script=failing_later), await router.start("m1")
    await router.finish(await router.submit())
    given, left = first.requests[0].deadline_seconds, second.requests[0].deadline_seconds
    assert left <= given - TRY_SECONDS, f"the retry got more than what was left of its deadline: {left} of {given} s"


async def a_retry_goes_on_after_the_delivered_tokens(router: LiveRouter) -> None:
    await router.start("m0", script=failing_after_two_tokens)
    second = await router.start("m1")
    await until(lambda: len(router.fleet.membership.records()) == 2, "two workers")
    await router.submit()
    await until(lambda: second.requests, "the retry")
    output_ids = list(second.requests[0].output_ids)
    assert output_ids == [7, 8], f"the retry goes on after {output_ids} instead of the delivered tokens"


async def a_failed_attempt_is_charged_to_nobody(router: LiveRouter) -> None:
    await router.start("m0", script=failing)
    await router.start("m1")
    await router.finish(await router.submit())
    check_charges(router)


def check_charges(router: LiveRouter) -> None:
    for record in router.fleet.membership.records():
        counts = (record.num_requests, record.prefill_tokens, record.context_tokens)
        assert counts == (0, 0, 0), f"{record.info.party} is still charged {counts}"


async def a_retried_prompt_is_computed_once_its_tokens_flow(router: LiveRouter) -> None:
    """The prefill worker's count falls with the first token of the retry, too."""

    def go_on(body: Request) -> Sequence[Reply]:
        return [Reply(StepTokens([TokenDelta(body.key, len(body.output_ids), [9])]))]

    await router.start("m0", script=failing_after_two_tokens)
    second = await router.start("m1", script=go_on)
    request = await router.submit()
    await until(lambda: len(request.state.delivered_ids) == 3, "a token of the retry")
    tokens = router.record(second.party).prefill_tokens
    assert tokens == 0, f"{second.party} is charged {tokens} prompt tokens that it has computed"


async def the_survivor_of_a_failed_attempt_is_aborted(router: LiveRouter) -> None:
    await router.start("p0", Role.PREFILL, failing)
    decode = await router.start("d0", Role.DECODE, answer_local)
    await router.finish(await router.submit())
    keys = [body.key for body in decode.requests]
    found = aborted(decode.received)
    assert found == keys[:1] and len(keys) == 2, f"of the attempts {keys} these were aborted: {found}"


def answer_local(body: Request) -> Sequence[Reply]:
    """A decode worker that leaves hand-overs hanging."""
    return default_script()(body) if isinstance(body, LocalRequest) else []


async def a_failed_handover_is_the_other_sides_fault(router: LiveRouter) -> None:
    def report(body: Request) -> Sequence[Reply]:
        if isinstance(body, DecodeRequest):
            return [Reply(RequestFailed(body.key, FailureCode.HANDOVER, "planted"))]
        return answer_local(body)

    prefill = await router.start("p0", Role.PREFILL, silent)
    decode = await router.start("d0", Role.DECODE, report)
    request = await router.submit()
    await until(lambda: request.state.history, "the failure")
    culprit = request.state.history[0].culprit
    assert culprit == prefill.party, f"{culprit} is blamed for what {decode.party} reported of {prefill.party}"


async def a_success_closes_the_breaker(router: LiveRouter) -> None:
    async def run(outcome: FailureCode | None) -> None:
        outcomes.append(outcome)
        await router.finish(await router.submit())

    def answer(body: Request) -> Sequence[Reply]:
        code = outcomes[-1]
        return default_script()(body) if code is None else [Reply(RequestFailed(body.key, code, "planted"))]

    outcomes: list[FailureCode | None] = []
    worker = await router.start("m0", script=answer)
    for outcome in (FailureCode.INTERNAL, FailureCode.INTERNAL, None, FailureCode.INTERNAL):
        await run(outcome)
    breaker = router.record(worker.party).breaker
    assert breaker.num_failures == 1, f"{breaker.num_failures} failures count, those before a success too"


class Hushable(InstantWorker):
    """Its heartbeats can be held back: then it is alive, and nobody knows."""

    is_silent = False

    def _tell(self, body: Body) -> None:
        if not (self.is_silent and isinstance(body, Heartbeat)):
            super()._tell(body)


async def a_worker_that_returns_hears_what_others_have_done_meanwhile(router: LiveRouter) -> None:
    first = await router.start("m0", script=silent, kind=Hushable)
    await router.start("m1")
    request = await router.submit()
    await until(lambda: first.requests, "the request at its first worker")
    first.is_silent = True
    await router.finish(request)
    assert router.state(first.party) is WorkerState.LOST and request.state.phase is RequestPhase.FINISHED
    first.is_silent = False
    await router.until_ready(first.party)
    await router.submit()
    await until(lambda: len(first.requests) == 2, "another request")
    keys = [body.key for body in first.requests]
    assert aborted(first.received) == keys[:1], f"{first.party} is back, and wasn't told to abort {keys[0]}"


async def a_lost_worker_is_ready_with_its_link_and_not_before(router: LiveRouter) -> None:
    worker = await router.start_by_hand("m0")
    worker.stop_listening()
    await until(lambda: router.state(worker.party) is WorkerState.LOST, "the loss")
    record = router.record(worker.party)
    with worker.be_mute():
        num_before = record.num_heartbeats
        worker.heartbeat()
        await until(lambda: record.num_heartbeats > num_before, "a heartbeat")
        for _ in range(20):
            assert record.state is not WorkerState.READY, f"{worker.party} is ready without its link"
            assert isinstance(router.dispatcher.core.placer.place(SHAPE, time.monotonic()), NoWorker)
            await asyncio.sleep(0.005)
    await until(lambda: record.state is WorkerState.LOST, "the broken link")
    worker.listen()
    worker.heartbeat()
    await router.until_ready(worker.party)
    await router.submit()
    await until(worker.received, "a request")


async def a_worker_whose_heartbeats_come_is_not_silent(router: LiveRouter) -> None:
    worker = await router.start("m0", heartbeat_seconds=0.1)
    record = router.record(worker.party)
    for _ in range(5):
        num_before, before = record.num_heartbeats, record.last_heard
        await until(lambda num=num_before: record.num_heartbeats > num, "a heartbeat")  # type: ignore[misc]
        assert record.last_heard > before, f"{worker.party} counts as silent although its heartbeats come"


async def a_draining_worker_gets_no_requests(router: LiveRouter) -> None:
    leaving = await router.start_by_hand("m0")
    staying = await router.start("m1")
    leaving.tell(Draining())
    await until(lambda: router.state(leaving.party) is WorkerState.DRAINING, "the drain")
    for _ in range(3):
        placement = router.dispatcher.core.placer.place(SHAPE, time.monotonic())
        assert placement == Local(staying.party), f"a request would go to {placement}, but {leaving.party} drains"
        await router.finish(await router.submit())


async def a_new_incarnation_takes_requests_over_for_good(router: LiveRouter) -> None:
    old = await router.start_by_hand("m0", incarnation=1)
    request = await router.submit()
    await until(old.received, "the request at the old incarnation")
    old.stop_listening()
    await until(lambda: router.state(old.party) is WorkerState.LOST, "the loss of the old incarnation")
    new = await router.start_by_hand("m0", incarnation=2)
    await until(new.received, "the request at the new incarnation")
    assert request.state.num_attempts == 2
    new.stop_listening()
    await until(lambda: router.state(new.party) is WorkerState.LOST, "the loss of the new incarnation")
    old.answers()
    old.register()
    answers: list[Body] = []
    await until(lambda: answers.extend(old.answers()) or answers, "an answer to the old incarnation")
    assert isinstance(answers[0], RegisterRefused), f"{old.party} is back, though {new.party} took its place"
    router.record(new.party)


async def a_live_worker_keeps_its_place(router: LiveRouter) -> None:
    alive = await router.start_by_hand("m0", incarnation=1)
    other = WorkerByHand(router.fleet.endpoint, Party("m0", 2))
    router.by_hand.append(other)
    other.register()
    answers: list[Body] = []
    await until(lambda: answers.extend(other.answers()) or answers, "an answer to the other incarnation")
    assert isinstance(answers[0], RegisterRefused), f"{other.party} has the place of {alive.party}, which is alive"
    router.record(alive.party)
