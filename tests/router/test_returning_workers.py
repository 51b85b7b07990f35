"""Workers that come back: one of a name serves, whatever is remembered of it, and ended links leave nothing behind."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def messages_of(name: str) -> Iterator[list[str]]:
    """Collect the messages that a logger gets."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


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


def no_link(*_arguments: Any, **_options: Any) -> None:
    raise ConfigError("too many open files")


async def it_cannot_be_dialled_for_a_while(router: LiveRouter) -> None:
    """As when sockets are short: it is refused for now, asks again, and is taken."""
    worker = WorkerByHand(router.fleet.endpoint, Party("w", 1))
    router.by_hand.append(worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splitserve.router.links.fleet.WorkerLink", no_link)
        for _ in range(2):
            refused = await answer_to(router, worker)
            assert refused == RegisterRefused("too many open files", for_good=False)
    assert isinstance(await answer_to(router, worker), Registered)
    await router.until_ready(worker.party)


async def its_handshake_takes_longer_than_a_link_has(router: LiveRouter) -> None:
    """As on a machine under load: each next link has more time, until one is up."""
    worker = WorkerByHand(router.fleet.endpoint, Party("w", 1))
    router.by_hand.append(worker)
    host, port = worker.endpoint.removeprefix("tcp://").split(":")
    num_dialled, writers = 0, list[asyncio.StreamWriter]()

    async def relay_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on everything, but the worker's first bytes late."""
        nonlocal num_dialled
        num_dialled += 1
        worker_reader, worker_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, worker_writer))

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_seconds: float) -> None:
            while data := await source.read(1 << 16):
                await asyncio.sleep(delay_seconds)
                delay_seconds = 0.0
                sink.write(data)
            sink.close()
            with suppress(OSError):
                await sink.wait_closed()

        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(reader, worker_writer, 0.0))
            group.create_task(pass_on(worker_reader, writer, 2.5 * DEAD_AFTER_SECONDS))

    relay = await asyncio.start_server(relay_slowly, "127.0.0.1", 0)
    worker.endpoint = f"tcp://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    assert isinstance(await answer_to(router, worker), Registered)
    async with Heartbeats(worker):
        await router.until_ready(worker.party)
    assert num_dialled >= 3
    relay.close()
    for each in writers:
        each.close()
    await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)


async def its_link_cannot_be_dialled_anew(router: LiveRouter) -> None:
    """As when sockets are short: it is forgotten, with its link, and may register again."""
    worker = WorkerByHand(router.fleet.endpoint, Party("w", 1))
    router.by_hand.append(worker)
    endpoint = worker.endpoint
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.MonkeyPatch.context() as patch:
        worker.endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        assert isinstance(await answer_to(router, worker), Registered)
        assert router.state(worker.party) is WorkerState.CONNECTING
        patch.setattr("splitserve.router.links.fleet.WorkerLink", no_link)
        async with Heartbeats(worker):
            with messages_of("splitserve.router.links.fleet") as lines:
                await until(lambda: router.state(worker.party) is None, "the second dial")
        assert [line for line in lines if "too many open files" in line] == [
            f"worker {worker.party} must register again: too many open files"
        ]
    worker.endpoint = endpoint
    assert isinstance(await answer_to(router, worker), Registered)
    await router.until_ready(worker.party)


@pytest.mark.parametrize(
    "scenario",
    [
        the_cut_off_one_comes_first,
        the_successor_comes_first,
        it_cannot_be_dialled_for_a_while,
        its_handshake_takes_longer_than_a_link_has,
        its_link_cannot_be_dialled_anew,
    ],
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
