"""Workers that come back: one of a name serves, whatever is remembered of it, and ended links leave nothing behind."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from live_router import LiveRouter, WorkerByHand, until
from splitserve.common.errors import ConfigError
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.membership import Registered, RegisterRefused
from splitserve.protocol.request import Party

DEAD_AFTER_SECONDS = 0.6
FORGET_AFTER_SECONDS = 1.2


async def answer_to(router: LiveRouter, worker: WorkerByHand) -> Body:
    worker.answers()
    worker.register()
    answers: list[Body] = []
    await until(lambda: answers.extend(worker.answers()) or answers, f"an answer to {worker.party}")
    router.fleet.check_invariants()
    return answers[0]


async def cut_off(router: LiveRouter) -> WorkerByHand:
    """A worker that was ready, then silent until nothing is known of it; it is still there."""
    worker = await router.start_by_hand("w", incarnation=1)
    await until(lambda: router.state(worker.party) is None, f"{worker.party} is still known")
    return worker


def successor_of(router: LiveRouter, worker: WorkerByHand) -> WorkerByHand:
    successor = WorkerByHand(router.fleet.endpoint, Party(worker.party.engine_id, 2))
    router.by_hand.append(successor)
    return successor


class Heartbeats:
    """A worker's, for as long as the block lasts."""

    def __init__(self, worker: WorkerByHand) -> None:
        self._worker = worker

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            self._worker.heartbeat()
            await asyncio.sleep(DEAD_AFTER_SECONDS / 10)


def serving(router: LiveRouter) -> list[Party]:
    return [view.party for view in router.fleet.membership.snapshot(0.0).workers]


async def the_cut_off_one_comes_first(router: LiveRouter) -> None:
    """It serves until it ends: its successor is refused meanwhile, and asks again."""
    worker = await cut_off(router)
    successor = successor_of(router, worker)
    assert isinstance(await answer_to(router, worker), Registered)
    async with Heartbeats(worker):
        await router.until_ready(worker.party)
        refused = await answer_to(router, successor)
        assert isinstance(refused, RegisterRefused) and not refused.for_good
        assert serving(router) == [worker.party]
    worker.stop_listening()  # as when its node ends it
    await until(lambda: router.state(worker.party) is WorkerState.LOST, "its end")
    assert isinstance(await answer_to(router, successor), Registered)
    async with Heartbeats(successor):
        await router.until_ready(successor.party)
        refused = await answer_to(router, worker)
        assert isinstance(refused, RegisterRefused) and refused.for_good
        assert serving(router) == [successor.party]


async def the_successor_comes_first(router: LiveRouter) -> None:
    """The one that was cut off is refused, and ends when that lasts."""
    worker = await cut_off(router)
    successor = successor_of(router, worker)
    assert isinstance(await answer_to(router, successor), Registered)
    async with Heartbeats(successor), Heartbeats(worker):
        await router.until_ready(successor.party)
        for _ in range(3):
            refused = await answer_to(router, worker)
            assert isinstance(refused, RegisterRefused) and not refused.for_good
            assert serving(router) == [successor.party]


async def its_link_cannot_be_dialled_anew(router: LiveRouter) -> None:
    """As when sockets are short: it is forgotten, with its link, and may register again."""

    def no_link(*_arguments: Any, **_options: Any) -> None:
        raise ConfigError("too many open files")

    worker = WorkerByHand(router.fleet.endpoint, Party("w", 1))
    router.by_hand.append(worker)
    endpoint = worker.endpoint
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.MonkeyPatch.context() as patch:
        worker.endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        assert isinstance(await answer_to(router, worker), Registered)
        assert router.state(worker.party) is WorkerState.CONNECTING
        patch.setattr("splitserve.router.links.fleet.WorkerLink", no_link)
        async with Heartbeats(worker):
            await until(lambda: router.state(worker.party) is None, "the second dial")
    worker.endpoint = endpoint
    assert isinstance(await answer_to(router, worker), Registered)
    await router.until_ready(worker.party)


@pytest.mark.parametrize(
    "scenario", [the_cut_off_one_comes_first, the_successor_comes_first, its_link_cannot_be_dialled_anew]
)
def test_a_worker_that_returns(scenario: Callable[[LiveRouter], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        router = LiveRouter(
            heartbeat_seconds=DEAD_AFTER_SECONDS / 10,
            dead_after_seconds=DEAD_AFTER_SECONDS,
            tombstone_seconds=FORGET_AFTER_SECONDS,
        )
        try:
            await scenario(router)
        finally:
            router.close()

    asyncio.run(play())
