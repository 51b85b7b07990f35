"""KV events: a subscriber's view adds up to the KV that a real worker holds, as docs/guides/kv-events.md specifies."""

import hashlib
import re
import struct
import urllib.request
from pathlib import Path

import msgspec
import pytest
import zmq

from serving import complete_all, wait_until_quiet
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.common.security import SocketSecurity
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.kvconnector.blocks.kv_events import KVEventLog, KVEvents
from splitserve.protocol.kv_event_batch import KVEvent, KVEventBatch
from splitserve.protocol.request import Party
from tier_chats import BLOCK_BYTES
from waiting import wait_until

SECRET = "a secret of sixteen characters"
PROMPTS = [[300 + (7 * user + position) % 1000 for position in range(6 * BLOCK_SIZE)] for user in range(12)]


class Subscriber:
    """Follows one worker as the document says."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", security: SocketSecurity, endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        security.protect_connecting(self.socket)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"kv")
        self.found: dict[str, set[bytes]] | None = None
        self.number = 0
        self.batch: KVEventBatch | None = None

    def numbers(self) -> dict[str, int] | None:
        """Return the number of blocks in each tier after the events so far; None before the first snapshot."""
        while self.socket.poll(50):
            topic, data = self.socket.recv_multipart()
            assert topic == b"kv"
            self.take(msgspec.msgpack.decode(data, type=KVEventBatch))
        return None if self.found is None else {tier: len(hashes) for tier, hashes in self.found.items()}

    def take(self, batch: KVEventBatch) -> None:
        self.batch = batch
        if batch.is_snapshot:
            self.found = {}
        elif self.found is None:
            return
        else:
            assert batch.number == self.number + 1
        self.number = batch.number
        for event in batch.events:
            known = self.found.setdefault(event.tier, set())
            if event.kind == "stored":
                known.update(event.hashes)
            else:
                known.difference_update(event.hashes)


def chain(root: bytes, tokens: list[int]) -> list[bytes]:
    """By the words of the document."""
    hashes = [root]
    for start in range(0, len(tokens), BLOCK_SIZE):
        data = struct.pack(f"<{BLOCK_SIZE}q", *tokens[start : start + BLOCK_SIZE])
        hashes.append(hashlib.blake2b(hashes[-1] + data, digest_size=16).digest())
    return hashes[1:]


def test_events_add_up_to_what_a_worker_holds(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_SECRET", SECRET)
    tiers = {"kv_memory_bytes": 24 * BLOCK_BYTES, "host_kv_memory_bytes": 60 * BLOCK_BYTES, "max_model_len": 256}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    security = SocketSecurity(context, SECRET)
    with cluster(tiny_qwen3, "mixed", **tiers, kv_events=True) as running:
        with urllib.request.urlopen(f"{running.url}/metrics") as page:
            [endpoint] = re.findall(r'kv_events_endpoint="(tcp://[^"]+)"', page.read().decode())
        first = Subscriber(context, security, endpoint)
        wait_until(lambda: first.numbers() == {}, "nothing is held before the first request")
        answers = complete_all(running.url, [body(tiny_qwen3, prompt) for prompt in PROMPTS], at_once=False)
        assert all(answer["status"] == 200 for answer in answers)
        [load] = wait_until_quiet(running.url).values()
        there = {"device": load["blocks_cached"], "host": load["tier_blocks"]}
        wait_until(lambda: first.numbers() == there, lambda: f"events add up to {first.numbers()}, there are {there}")
        second = Subscriber(context, security, endpoint)
        wait_until(lambda: second.numbers() == there, lambda: f"told {second.numbers()}, there are {there}")
        assert first.found is not None and first.batch is not None
        assert first.found == second.found, "what the events add up to isn't what is there"
        assert len(first.found["host"]) == 60, "the tier is full: some were evicted"
        last = chain(first.batch.root_hash, PROMPTS[-1])
        assert set(last) <= first.found["device"] and set(last) <= first.found["host"]
        assert not set(chain(first.batch.root_hash, PROMPTS[0])) <= first.found["host"]
    context.destroy(linger=0)


def test_subscribers_need_the_shared_secret() -> None:
    sockets = WorkerSockets(Party("w", 1), "127.0.0.1", "tcp://127.0.0.1:1", SECRET)
    publisher, endpoint = sockets.bind_publisher()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger, friend = context.socket(zmq.SUB), context.socket(zmq.SUB)
    security = SocketSecurity(context, SECRET)
    security.protect_connecting(friend)
    for socket in (stranger, friend):
        socket.connect(endpoint)
        socket.subscribe(b"kv")

    def is_heard() -> bool:
        publisher.send_multipart([b"kv", b"x"], zmq.NOBLOCK)
        return bool(friend.poll(50))

    wait_until(is_heard)
    assert not stranger.poll(200)
    context.destroy(linger=0)
    sockets.close()


def test_events_of_a_kind_are_joined_in_order() -> None:
    log = KVEventLog()
    log.stored("host", [b"1"])
    log.stored("host", [b"2", b"3"])
    log.evicted("host", [b"1"])
    log.stored("device", [])
    log.stored("host", [b"1"])
    assert log.take() == [
        KVEvent("stored", "host", [b"1", b"2", b"3"]),
        KVEvent("evicted", "host", [b"1"]),
        KVEvent("stored", "host", [b"1"]),
    ]
    assert log.take() == []


def test_off_keeps_nothing() -> None:
    events = KVEvents()
    events.stored("host", [b"1"])
    assert events.take() == []
