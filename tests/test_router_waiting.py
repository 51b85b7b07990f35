"""Requests whose attempt failed and that wait for a worker, in a dispatcher without a network."""

import asyncio

import pytest

from splitserve.benchmarks.worker_script import DEFAULT_LAYOUT
from splitserve.config import RouterConfig
from splitserve.messages import Body, LocalRequest, WorkerInfo
from splitserve.request import Party, Role, SamplingParams
from splitserve.router import dispatcher as module
from splitserve.router.dispatcher import Dispatcher
from splitserve.router.inbox import Inbox
from splitserve.router.metrics import RouterMetrics


def test_a_request_that_waits_goes_on_as_soon_as_a_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_seconds", lambda num_tries, chosen: 1000.0)
    asyncio.run(lose_the_only_worker_and_get_another())


async def lose_the_only_worker_and_get_another() -> None:
    dispatcher = Dispatcher(RouterConfig(model="m", served_model_name="m"), RouterMetrics())
    sent: list[tuple[Party, Body]] = []
    dispatcher.fleet.send = lambda party, body: sent.append((party, body)) or True  # type: ignore[method-assign,func-returns-value]
    try:
        first, second = Party("mixed-0", 1), Party("mixed-0", 2)
        make_ready(dispatcher, first)
        dispatcher.submit(0, [1, 2, 3], SamplingParams(max_tokens=5), Inbox(), asyncio.get_running_loop().time())
        dispatcher.fleet.membership.lose(first)
        dispatcher._on_worker_lost(first, "is gone")
        assert [party for party, _ in sent] == [first], "there is nobody else"
        make_ready(dispatcher, second)
        party, body = sent[-1]
        assert party == second and isinstance(body, LocalRequest) and body.key.attempt == 1
        make_ready(dispatcher, Party("mixed-1", 3))
        assert len(sent) == 2, "once is enough"
    finally:
        dispatcher.close()


def make_ready(dispatcher: Dispatcher, party: Party) -> None:
    info = WorkerInfo(party, Role.MIXED, "tcp://127.0.0.1:1", 1, DEFAULT_LAYOUT, 64, 8, 1000, 100)
    assert dispatcher.fleet.membership.register(party, info, 0.0).refusal is None
    dispatcher.fleet.membership.link_up(party)
    dispatcher._on_worker_ready(party)
