"""The host tier of a worker of several ranks: a copy is over when it is on all of them; the same tokens come back."""

from pathlib import Path

import pytest

from serving import PATIENT, complete_all, transformers_greedy, wait_until_quiet
from splitserve.kvconnector.ranks.copies import CopyJoin, StateJoin
from splitserve.kvconnector.tiers.commands import CopyResult
from splitserve.kvconnector.tiers.shared import TierState
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 4  # of all heads: two layers, two heads, keys and values, 16 tokens, float32
PROMPTS = [[300 + 7 * (user * 160 + position) % 1100 for position in range(160 + user)] for user in range(8)]


def test_a_copy_is_as_good_as_on_the_worst_rank() -> None:
    join = CopyJoin(3)
    assert join.add(CopyResult(7, 5, None, 0.2)) is None
    assert join.add(CopyResult(7, 2, "gone", 0.1)) is None
    assert join.add(CopyResult(7, 4, "full", 0.5)) == CopyResult(7, 2, "gone", 0.5)


def test_a_copy_that_one_rank_has_dropped_says_nothing_about_its_content() -> None:
    join = CopyJoin(2)
    assert join.add(CopyResult(7, 0, was_dropped=True)) is None
    assert join.add(CopyResult(7, 5, None, 0.2)) == CopyResult(7, 0, None, 0.2, was_dropped=True)


def test_a_tier_that_is_full_on_one_rank_is_full() -> None:
    join = CopyJoin(2)
    assert join.add(CopyResult(7, 0, "full", 0.2, is_full=True)) is None
    assert join.add(CopyResult(7, 5, None, 0.1)) == CopyResult(7, 0, "full", 0.2, is_full=True)


def test_a_shared_tier_is_there_once_it_is_for_every_rank() -> None:
    join, away = StateJoin(2), TierState("lmcache", False)
    there, larger = TierState("lmcache", True, 64), TierState("lmcache", True, 128)
    assert join.add(1, there) == away, "rank 0 hasn't said anything"
    assert join.add(0, there) == there
    assert join.add(1, away) == away
    assert join.add(1, larger) == away, "it was started again, and rank 0 doesn't know it yet"
    assert join.add(0, away) == away
    assert join.add(0, larger) == larger
    cleared = TierState("lmcache", True, 128, num_clears=1)
    assert join.add(0, cleared) == away, "rank 1 has not cleared it yet"
    assert join.add(1, cleared) == cleared


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_prompts_come_back_from_the_ranks_host_tiers(two_heads: Path, size: int) -> None:
    """Four ranks hold each of two heads twice."""

    def body(prompt: list[int]) -> dict[str, object]:
        options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": two_heads.name, "prompt": prompt, **options}

    bodies = [body(prompt) for prompt in PROMPTS]
    references = transformers_greedy(two_heads, PROMPTS, 4)
    heads = max(2, size)  # with more ranks than heads some are held twice
    small = EngineConfig(
        model=str(two_heads),
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        threads=1,
        tensor_parallel_size=size,
        kv_memory_bytes=32 * BLOCK_BYTES * heads // 2,
        host_kv_memory_bytes=200 * BLOCK_BYTES * heads // 2,
        max_model_len=256,
    )
    with LocalCluster(simple_spec(small, port=0, num_mixed=1, protocol=PATIENT), log_level="warning") as running:
        for number in range(3):
            answers = complete_all(running.url, bodies, at_once=number == 2)
            for answer, reference in zip(answers, references, strict=True):
                assert reference.agrees(answer["choices"][0]["token_ids"])
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert number == 0 or sum(cached) > 0.8 * sum(map(len, PROMPTS))
        [load] = wait_until_quiet(running.url).values()
    assert load["tier_loaded_blocks_total"] > 100 and load["tier_failures_total"] == 0
    assert load["blocks_free"] + load["blocks_cached"] <= 80, "the pool holds no more than half of it"
