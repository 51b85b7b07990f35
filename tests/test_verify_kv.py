"""``--verify-kv``: digests of blocks on both sides of a hand-over, up to a damaged block in a real cluster."""

import random
from pathlib import Path

import pytest

from core_driver import KEY, PREFILL, PROMPT
from serving import complete_all, transformers_greedy, wait_until_quiet
from simulator import BLOCK_SIZE, LAYOUT, PROTOCOL
from splitserve.config import EngineConfig
from splitserve.handover import ReadResult, SinkHandover, SinkState
from splitserve.kvconnector.digest import DIGEST_BYTES, digests_of, first_digests_of, no_digests
from splitserve.kvconnector.memory import KVMemory
from splitserve.messages import LayoutRecord, Offer, OfferedBlock
from splitserve.orchestration.launcher import Entries, LocalCluster
from splitserve.orchestration.shorthand import simple_spec

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


def test_a_first_digest_lasts_as_long_as_the_content() -> None:
    memory = KVMemory(LAYOUT, 2)
    first_digests = first_digests_of(memory)
    before = first_digests([0, 1])
    memory.blocks[0] += 1  # damage
    assert first_digests([0, 1]) == before
    memory.generations[0] += 1  # other content
    assert first_digests([0, 1]) == [digests_of(memory)([0])[0], before[1]]
    assert first_digests([0]) != before[:1]


def offered_handover(digests: list[bytes]) -> tuple[SinkHandover, int]:
    """A hand-over with one read of all blocks under way; and the read's id."""
    handover = SinkHandover(
        KEY, PREFILL, num_prompt_tokens=len(PROMPT), num_cached_tokens=0, local_blocks=[5, 6, 7],
        block_size=BLOCK_SIZE, block_bytes=64, config=PROTOCOL, now=0.0,
    )  # fmt: skip
    blocks = [OfferedBlock(block_id, 100, digest) for block_id, digest in enumerate(digests)]
    handover.on_offer(Offer(KEY, 0, blocks, len(PROMPT), True, [1]), 10, 0.0)
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


@pytest.mark.timeout(240)
def test_a_block_that_is_damaged_at_its_source_is_noticed_and_never_used(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real workers, real NIXL; the source's memory changes between digest and read."""
    chosen = random.Random(3)
    prompts = [[chosen.randrange(300, 1500) for _ in range(length)] for length in (40, 20, 90, 130, 33, 50)]
    prompts.append(prompts[3] + prompts[0])
    max_tokens = 8
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", block_size=16, kv_memory_bytes=32 << 20, max_num_batched_tokens=64,
        tail_chunk_tokens=16, verify_kv=True,
    )  # fmt: skip
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1)
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
