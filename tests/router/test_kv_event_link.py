"""KV events from a worker's socket to the router's view: large ones arrive, and hold up nothing on the event loop."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import zmq

from live_router import LiveRouter, WorkerByHand, until
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT
from splitserve.common.errors import ConfigError
from splitserve.common.security import SocketSecurity
from splitserve.engine.io.kv_event_socket import KVEventSocket
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.kvconnector.blocks.kv_events import KVEventLog
from splitserve.protocol.kv_event_batch import KVEvent
from splitserve.protocol.messages.membership import Register, WorkerInfo
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import MAX_MESSAGE_BYTES
from splitserve.router.links import kv_event_link
from splitserve.router.links.kv_event_link import MAX_BLOCKS_PER_TURN, KVEventLink
from splitserve.router.placement.prefix_view import PrefixView

ME = Party("w", 1)
NOBODY = "tcp://127.0.0.1:1"  # an endpoint where nobody listens
PATIENCE_SECONDS = 60.0
LONG = 1024  # bytes of a hash: few of them make a message that is large
HASHES = [number.to_bytes(LONG, "big") for number in range(MAX_MESSAGE_BYTES // LONG + 1)]


class Blocks:
    """The part of a worker's blocks that the socket looks at."""

    block_size, root_hash = 16, b"r" * 16

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = hashes
        self.tiers = SimpleNamespace(events=KVEventLog())

    def contents(self) -> list[KVEvent]:
        return [KVEvent("stored", "device", list(self.hashes))]


@dataclass
class Setup:
    """A worker's publisher and a router's subscription to it."""

    publisher: KVEventSocket
    blocks: Blocks
    view: PrefixView
    link: KVEventLink

    @property
    def num_seen(self) -> int:
        return self.view.num_blocks(ME).get("device", 0)

    async def sizes_until(self, size: int) -> list[int]:
        """Return the sizes of the view in all turns of the loop, until it has ``size`` blocks, as announced."""
        sizes = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.num_seen != size or not self.view.announces(ME):
                self.publisher.publish(self.blocks, asyncio.get_running_loop().time())  # type: ignore[arg-type]
                await asyncio.sleep(0)
                sizes.append(self.num_seen)
        return sizes


@contextlib.asynccontextmanager
async def subscribed(hashes: list[bytes]) -> AsyncIterator[Setup]:
    sockets = WorkerSockets(ME, "127.0.0.1", NOBODY, "")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    view, publisher = PrefixView(), KVEventSocket(sockets)
    info = SimpleNamespace(party=ME, kv_events_endpoint=publisher.endpoint)
    link = KVEventLink(context, info, SocketSecurity(context, ""), view.apply_in_parts)  # type: ignore[arg-type]
    try:
        yield Setup(publisher, Blocks(hashes), view, link)
    finally:
        link.close()
        sockets.close()
        context.destroy(linger=0)


def test_a_snapshot_larger_than_messages_may_be_arrives_in_turns_of_the_loop() -> None:
    async def run() -> None:
        async with subscribed(HASHES) as setup:
            sizes = await setup.sizes_until(len(HASHES))
            steps = [after - before for before, after in itertools.pairwise(sizes)]
            assert max(steps) <= MAX_BLOCKS_PER_TURN

    asyncio.run(run())


def test_events_behind_a_large_batch_are_applied_after_it() -> None:
    async def run() -> None:
        async with subscribed([]) as setup:
            events = setup.blocks.tiers.events
            await setup.sizes_until(0)
            events.stored("device", HASHES)
            await setup.sizes_until(1024)
            events.evicted("device", HASHES[-100:])
            events.evicted("device", HASHES[:100])
            await setup.sizes_until(len(HASHES) - 200)
            events.stored("device", HASHES[:10])
            await setup.sizes_until(len(HASHES) - 190)

    asyncio.run(run())


def test_a_lost_snapshot_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_link, "SNAPSHOT_PATIENCE_SECONDS", 0.05)

    async def run() -> None:
        async with subscribed(HASHES[:3]) as setup, asyncio.timeout(PATIENCE_SECONDS):
            while not setup.publisher._has_new_subscriber():  # and its snapshot is lost
                await asyncio.sleep(0.01)
            await setup.sizes_until(3)

    asyncio.run(run())


def test_a_full_queue_of_batches_ends_with_what_the_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batches are among those that there was no room for, and the worker sends no others after them."""
    monkeypatch.setattr(kv_event_link, "MAX_QUEUED_BATCHES", 4)

    async def run() -> None:
        async with subscribed([]) as setup:
            await setup.sizes_until(0)
            events, setup.blocks.hashes = setup.blocks.tiers.events, HASHES[100:]
            events.stored("device", HASHES)  # takes many turns
            setup.publisher.publish(setup.blocks, 0.0)  # type: ignore[arg-type]
            for each in HASHES[:100]:
                events.evicted("device", [each])
                setup.publisher.publish(setup.blocks, 0.0)  # type: ignore[arg-type]
            await setup.sizes_until(len(HASHES) - 100)

    asyncio.run(run())


def test_a_link_that_closes_amid_a_batch_applies_no_more_of_it() -> None:
    async def run() -> None:
        async with subscribed(HASHES) as setup:
            await setup.sizes_until(MAX_BLOCKS_PER_TURN)
            setup.link.close()
            for _ in range(10):
                await asyncio.sleep(0)
            assert setup.num_seen <= 2 * MAX_BLOCKS_PER_TURN

    asyncio.run(run())


def test_a_lack_of_sockets_is_reported_as_what_cannot_be_followed() -> None:
    async def run() -> None:
        async with subscribed([]) as setup:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            context.set(zmq.MAX_SOCKETS, 1)
            info = SimpleNamespace(party=ME, kv_events_endpoint=setup.publisher.endpoint)
            with context.socket(zmq.PAIR), pytest.raises(ConfigError, match="can't be followed: Too many open files"):
                KVEventLink(context, info, SocketSecurity(context, ""), setup.view.apply_in_parts)  # type: ignore[arg-type]
            context.destroy(linger=0)

    asyncio.run(run())


def test_a_subscription_that_could_not_be_made_is_made_with_a_later_heartbeat() -> None:
    async def run() -> None:
        router = LiveRouter()
        with contextlib.closing(router):
            worker = WorkerByHand(router.fleet.endpoint, ME)
            router.by_hand.append(worker)
            sizes = (64, 8, 1000, 400)
            info = WorkerInfo(ME, Role.MIXED, worker.endpoint, 1, DEFAULT_LAYOUT, *sizes, kv_events_endpoint=NOBODY)
            worker.tell(Register(info))
            await router.until_ready(ME)
            router.fleet._kv_event_links.pop(ME).close()
            worker.heartbeat()
            await until(lambda: ME in router.fleet._kv_event_links, "its events aren't followed")

    asyncio.run(run())
