"""``--verify-kv``: digests of blocks on both sides of a hand-over, up to a damaged block in a real cluster."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core_driver import DECODE, KEY, PREFILL, PROMPT, Worker, grant, prefill_request, sent
from serving import PATIENT, complete_all, transformers_greedy, wait_until_quiet
from splitserve.kvconnector.blocks import digest
from splitserve.kvconnector.blocks.digest import DIGEST_BYTES, DigestBlocks, FirstDigests, digests_of, no_digests
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.orchestration.cluster.launcher import Entries, LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.handover.pull import Pull, PullSpan
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.handover import Offer, OfferAck, OfferedBlock, OfferedSpan, Release
from splitserve.protocol.messages.requests import Abort, StepTokens
from splitserve.protocol.request import Role
from splitserve.simulation.model import BLOCK_SIZE, LAYOUT, PROTOCOL, ROUTER
from waiting import PATIENCE_SECONDS

NUM_BLOCKS = 3  # of the prompt; the last one is half full
DIGESTS = [bytes([index] * DIGEST_BYTES) for index in range(NUM_BLOCKS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_digest_is_of_every_byte_of_its_block(dtype: str) -> None:
    memory = KVMemory(LayoutRecord("m", "w", dtype, 4, 2, 1, 8), 3)
    digest_blocks = digests_of(memory)
    before = digest_blocks([0, 1, 2])
    assert len(set(before)) == 1 and len(before[0]) == DIGEST_BYTES
    memory.blocks[1].view(-1)[-1] = 1.0
    assert digest_blocks([0, 1, 2]) == [before[0], digest_blocks([1])[0], before[2]]
    assert digest_blocks([1]) != before[1:2]
    memory.blocks[2] = memory.blocks[1]
    assert digest_blocks([1]) == digest_blocks([2])


class Asker:
    """Asks for first digests until all are there, as the engine loop does whenever it's woken."""

    def __init__(self, memory: KVMemory) -> None:
        self.woken = threading.Semaphore(0)
        self.first_digests = FirstDigests(memory, self.woken.release)

    def __call__(self, block_ids: list[int]) -> list[bytes]:
        while len(digests := self.first_digests(block_ids)) < len(block_ids):
            assert self.woken.acquire(timeout=PATIENCE_SECONDS), "it didn't say that there's more"
        return digests


def test_a_first_digest_lasts_as_long_as_the_content() -> None:
    memory = KVMemory(LAYOUT, 2)
    first_digests = Asker(memory)
    before = first_digests([0, 1])
    assert before == digests_of(memory)([0, 1])
    memory.blocks[0] += 1  # damage
    assert first_digests([0, 1]) == before
    memory.generations[0] += 1  # other content
    assert first_digests([0, 1]) == [digests_of(memory)([0])[0], before[1]]
    assert first_digests([0]) != before[:1]


def test_who_asks_for_digests_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KVMemory(LAYOUT, 4)
    go_on = threading.Event()

    def slowly(memory: KVMemory) -> DigestBlocks:
        return lambda block_ids, group=0: [
            bytes([block_id]) for block_id in block_ids if block_id == 1 or go_on.wait(PATIENCE_SECONDS)
        ]

    monkeypatch.setattr(digest, "digests_of", slowly)
    asker = Asker(memory)
    assert asker.first_digests([0, 1, 2]) == []
    assert asker.woken.acquire(timeout=PATIENCE_SECONDS)
    assert asker.first_digests([0, 1, 2]) == [], "the first one isn't there, so none can be offered"
    assert asker.first_digests([1, 0]) == [b"\1"]
    go_on.set()
    assert asker([0, 1, 2]) == [b"\0", b"\1", b"\2"]


def test_a_digest_of_older_content_may_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is suspended after it has read the older content; meanwhile the other one answers for the newer."""
    memory = KVMemory(LAYOUT, 1)
    was_read, go_on = threading.Event(), threading.Event()
    real = digests_of(memory)

    def one_slowly(memory: KVMemory) -> DigestBlocks:
        def digest_blocks(block_ids: Sequence[int], group: int = 0) -> list[bytes]:
            found = real(block_ids, group)
            if not was_read.is_set():
                was_read.set()
                assert go_on.wait(PATIENCE_SECONDS)
            return found

        return digest_blocks

    monkeypatch.setattr(digest, "digests_of", one_slowly)
    asker = Asker(memory)
    assert asker.first_digests([0]) == []
    assert was_read.wait(PATIENCE_SECONDS)
    memory.generations[0] += 1
    memory.blocks[0] += 1
    assert asker.first_digests([0]) == []
    assert asker.woken.acquire(timeout=PATIENCE_SECONDS), "the newer content's digest is known"
    go_on.set()
    assert asker.woken.acquire(timeout=PATIENCE_SECONDS), "the older content's digest is known, too"
    assert asker.first_digests([0]) == real([0])


@pytest.mark.gpu
def test_digests_of_blocks_on_a_gpu_are_those_of_their_bytes() -> None:
    on_host = KVMemory(LAYOUT, 3)
    on_host.blocks.copy_(torch.randn(on_host.blocks.shape))
    on_gpu = KVMemory(LAYOUT, 3, torch.device("cuda", 0))
    on_gpu.blocks.copy_(on_host.blocks)
    torch.cuda.synchronize()
    assert digests_of(on_gpu)([0, 1, 2]) == digests_of(on_host)([0, 1, 2])
    assert Asker(on_gpu)([2, 0]) == digests_of(on_host)([2, 0])


class SlowDigests:
    """Digests that are known once they're released."""

    def __init__(self) -> None:
        self.num_known = 0

    def __call__(self, block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        assert group == 0
        return [bytes([7] * DIGEST_BYTES)] * min(self.num_known, len(block_ids))


def test_blocks_are_offered_as_their_digests_become_known() -> None:
    digests = SlowDigests()
    prefill = Worker(Role.PREFILL, PREFILL, leading_digests=digests)
    prefill.hear(ROUTER, prefill_request())
    prefill.hear(DECODE, grant())
    while (plan := prefill.plan()) is not None:
        effects = prefill.commit(plan)
        assert sent(effects, Offer) == []
    assert sent(effects, StepTokens), "the first token doesn't wait for them"
    digests.num_known = 1
    (offer,) = sent(prefill.tick(), Offer)
    assert isinstance(offer, Offer) and (len(offer.spans[0].blocks), offer.num_tokens, offer.last) == (
        1,
        BLOCK_SIZE,
        False,
    )
    prefill.hear(DECODE, OfferAck(KEY, [1], False))
    digests.num_known = 2
    (offer,) = sent(prefill.tick(), Offer)
    assert isinstance(offer, Offer) and offer.last
    assert (offer.spans[0].first_block, len(offer.spans[0].blocks), offer.num_tokens, len(offer.first_tokens)) == (
        1,
        2,
        len(PROMPT),
        1,
    )
    prefill.hear(DECODE, Release(KEY, True))
    prefill.assert_idle()


@pytest.mark.parametrize("end", [Abort(KEY), Release(KEY, False)])
def test_a_request_that_ends_while_its_digests_are_made(end: Abort | Release) -> None:
    digests = SlowDigests()
    prefill = Worker(Role.PREFILL, PREFILL, leading_digests=digests)
    prefill.hear(ROUTER, prefill_request())
    prefill.hear(DECODE, grant())
    while (plan := prefill.plan()) is not None:
        prefill.commit(plan)
    prefill.hear(DECODE if isinstance(end, Release) else ROUTER, end)
    digests.num_known = 3
    assert sent(prefill.tick(), Offer) == []
    prefill.assert_idle()


def offered_handover(digests: list[bytes]) -> tuple[SinkHandover, int]:
    """A hand-over with one read of all blocks in flight; and the read's id."""
    pull = Pull(len(PROMPT), 0, BLOCK_SIZE, [PullSpan(0, [5, 6, 7], 64)])
    handover = SinkHandover(KEY, PREFILL, pull, PROTOCOL, 0.0)
    blocks = [OfferedBlock(block_id, 100, digest) for block_id, digest in enumerate(digests)]
    handover.on_offer(Offer(KEY, [OfferedSpan(0, 0, blocks)], len(PROMPT), True, [1]), [10], 0.0)
    (read,) = handover.poll(0.0, can_read=True, next_read_id=1).reads
    return handover, read.read_id


@pytest.mark.parametrize(
    ("offered", "landed", "state", "failure"),
    [
        (DIGESTS, DIGESTS, SinkState.COMPLETE, ""),
        (DIGESTS, no_digests(range(NUM_BLOCKS)), SinkState.COMPLETE, ""),
        (DIGESTS, [*DIGESTS[:2], DIGESTS[0]], SinkState.FAILED, "1 of 3 blocks arrived with other bytes"),
        (no_digests(range(NUM_BLOCKS)), DIGESTS, SinkState.FAILED, "start it with --verify-kv, too"),
        (no_digests(range(NUM_BLOCKS)), no_digests(range(NUM_BLOCKS)), SinkState.COMPLETE, ""),
    ],
    ids=["equal", "decode doesn't verify", "the last one differs", "prefill doesn't digest", "off"],
)
def test_what_landed_must_be_what_was_offered(
    offered: list[bytes], landed: list[bytes], state: SinkState, failure: str
) -> None:
    handover, read_id = offered_handover(offered)
    handover.on_read_result(ReadResult(read_id, None, [100] * NUM_BLOCKS, 0.0, landed), 0.1)
    assert handover.state is state
    assert failure in handover.failure
    assert len(handover.mismatches) == ("other bytes" in failure)


def test_a_moved_generation_is_no_incident() -> None:
    handover, read_id = offered_handover(DIGESTS)
    handover.on_read_result(ReadResult(read_id, None, [100, 101, 100], 0.0, DIGESTS[::-1]), 0.1)
    assert handover.state is SinkState.FAILED
    assert handover.mismatches == []


def test_a_block_that_is_damaged_at_its_source_is_noticed_and_never_used(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real workers, real NIXL; the source's memory changes between digest and read."""
    chosen = random.Random(3)
    prompts = [[chosen.randrange(300, 1500) for _ in range(length)] for length in (40, 20, 90, 130, 33, 50)]
    prompts.append(prompts[3] + prompts[0])
    max_tokens = 8
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", block_size=16, kv_memory_bytes=32 << 20, max_num_batched_tokens=64,
        tail_chunk_tokens=16, verify_kv=True,
    )  # fmt: skip
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, protocol=PATIENT)
    with LocalCluster(spec, log_level="warning", entries=Entries(worker="damaging_worker:run_worker")) as cluster:
        bodies = [
            {
                "model": tiny_qwen3.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
            }
            for prompt in prompts
        ]  # fmt: skip
        answers = complete_all(cluster.url, bodies, at_once=False)
        metrics = wait_until_quiet(cluster.url)
    assert [answer["status"] for answer in answers] == [200] * len(prompts)
    for answer, reference in zip(answers, transformers_greedy(tiny_qwen3, prompts, max_tokens), strict=True):
        assert reference.agrees(answer["choices"][0]["token_ids"])
    decode = metrics["decode-0"]
    assert decode["kv_mismatches_total"] >= 1
    assert decode["handovers_total"] >= len(prompts) - 2, "the others were handed over"
