"""The dispatcher's accounts: clients that leave at any moment, effects that fail, tenants that are gone."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from live_router import PROMPT, LiveRouter, aborted, until
from splitserve.protocol.messages.requests import StepTokens, TokenDelta
from splitserve.protocol.request import Party, SamplingParams
from splitserve.router.http.inbox import Inbox
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.dispatcher import ClientGoneError
from splitserve.router.requests.queue.tenants import Tenant, Tenants
from splitserve.router.requests.state import Update
from waiting import PATIENCE_SECONDS


def run(test: Callable[[LiveRouter], Coroutine[Any, Any, None]]) -> None:
    async def with_router() -> None:
        router = LiveRouter()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test(router)
        finally:
            router.close()

    asyncio.run(with_router())


async def submit(
    router: LiveRouter, inbox: Inbox, client: asyncio.Future[None] | None = None, **values: Any
) -> ActiveRequest:
    """Begin a request with these sampling parameters; ``client`` is done when it has left."""
    loop = asyncio.get_running_loop()
    client = client or loop.create_future()
    num_choices = values.pop("num_choices", 1)
    sampling = SamplingParams(max_tokens=4, **values)
    return await router.dispatcher.submit_in_time(
        0, PROMPT, sampling, inbox, loop.time(), watch_client=lambda: client, num_choices=num_choices
    )


def step(*tokens: tuple[ActiveRequest, int]) -> StepTokens:
    """Return the message of a worker's step: a first token of each request."""
    return StepTokens([TokenDelta(request.state.key, 0, [token_id], None, 0) for request, token_id in tokens])


def test_a_client_that_leaves_when_its_request_begins_leaves_no_choice_behind() -> None:
    """Its connection ends in the turn of the event loop in which a worker becomes ready."""

    async def test(router: LiveRouter) -> None:
        client = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(submit(router, Inbox(), client, num_choices=3))
        await until(lambda: len(router.dispatcher.core.waiting_room), "the request does not wait")
        begin = router.fleet._on_ready

        def begin_and_leave(party: Party) -> None:
            begin(party)
            assert len(router.dispatcher.core.requests) == 3
            client.set_result(None)

        router.fleet._on_ready = begin_and_leave
        worker = await router.start_by_hand("m0")
        with pytest.raises(ClientGoneError):
            await waiting
        assert not len(router.dispatcher.core.requests) and not router.dispatcher._inboxes
        received: list[Any] = []
        await until(lambda: received.extend(worker.received()) or len(aborted(received)) == 3, "the choices run on")

    run(test)


def test_an_effect_that_fails_costs_no_other_request_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Inbox):
        def put(self, index: int, update: Update) -> None:
            raise MemoryError("no room for an update")

    async def test(router: LiveRouter) -> None:
        worker = await router.start_by_hand("m0")
        inbox = Inbox()
        failing, abandoned = await submit(router, Full()), await submit(router, Inbox())
        other = await submit(router, inbox)
        del router.dispatcher._inboxes[abandoned.request_id]
        router.dispatcher._on_messages(worker.party, [step((failing, 7), (abandoned, 8), (other, 9))])
        assert [list(update.token_ids) for _, update in await inbox.take()] == [[9]]

    with caplog.at_level(logging.ERROR, "asyncio"):
        run(test)
    assert "the effect Deliver" in caplog.text and "MemoryError: no room" in caplog.text
    assert "KeyError" not in caplog.text


def test_a_message_that_cannot_be_written_fails_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """It would else run until its deadline, without a worker."""

    async def test(router: LiveRouter) -> None:
        await router.start_by_hand("m0")
        inbox = Inbox()
        await router.finish(await submit(router, inbox, stop_token_ids=(1 << 70,)))
        [*_, (_, last)] = await inbox.take()
        assert last.failure is not None

    run(test)
    assert "the effect Send" in caplog.text


def test_requests_of_a_tenant_that_is_gone_count_as_its_own() -> None:
    """A tenant is taken out of the file between the check of its key and the admission of its request."""

    async def test(router: LiveRouter) -> None:
        dispatcher, usage = router.dispatcher, router.dispatcher.core.usage
        dispatcher.tenants = Tenants((Tenant(name="other", keys=("key-of-other",)),))
        dispatcher.admit(2, tenant="gone")
        assert usage.in_flight() == {"gone": 2}
        dispatcher.release(2, tenant="gone")
        assert usage.in_flight() == {} and dispatcher.core.admission.num_admitted == 0
        usage.release("gone", 1)
        assert usage.in_flight() == {}

    run(test)
