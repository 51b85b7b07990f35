"""Several choices of a prompt on real clusters: the same tokens everywhere, one prefill and one hand-over for all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import complete_all, wait_until_quiet
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster

PROMPT = [300 + 7 * number for number in range(5 * BLOCK_SIZE + 5)]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def disaggregated(tiny_qwen3: Path) -> Iterator[LocalCluster]:
    with cluster(tiny_qwen3, "1P1D") as running:
        yield running


def choices_of(url: str, request: dict[str, Any]) -> list[list[int]]:
    (answer,) = complete_all(url, [request], at_once=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(request.get("n", 1)))
    return [choice["token_ids"] for choice in answer["choices"]]


def test_choices_are_the_same_wherever_they_run(disaggregated: LocalCluster, tiny_qwen3: Path) -> None:
    url = disaggregated.url
    (greedy,) = choices_of(url, body(tiny_qwen3, PROMPT))
    assert choices_of(url, body(tiny_qwen3, PROMPT, n=2)) == [greedy, greedy]
    sampled = choices_of(url, body(tiny_qwen3, PROMPT, n=4, **SAMPLED))
    assert len({tuple(tokens) for tokens in sampled}) == 4, "each choice has draws of its own"
    assert sampled[:1] == choices_of(url, body(tiny_qwen3, PROMPT, **SAMPLED)), "the first is that of a single request"
    assert sampled[:3] == choices_of(url, body(tiny_qwen3, PROMPT, n=3, **SAMPLED))
    with cluster(tiny_qwen3, "mixed") as mixed:
        assert choices_of(mixed.url, body(tiny_qwen3, PROMPT, n=4, **SAMPLED)) == sampled
        (counted,) = wait_until_quiet(mixed.url).values()
        assert counted["prompt_tokens_total"] == len(PROMPT)


def test_eight_choices_cost_one_prefill_and_one_handover(disaggregated: LocalCluster, tiny_qwen3: Path) -> None:
    prompt = [number + 1 for number in PROMPT]
    before = wait_until_quiet(disaggregated.url)
    (answer,) = complete_all(disaggregated.url, [body(tiny_qwen3, prompt, n=8, **SAMPLED)], at_once=True)
    after = wait_until_quiet(disaggregated.url)

    def added(worker: str, name: str) -> float:
        return after[worker][name] - before[worker][name]

    assert added("prefill-0", "prompt_tokens_total") == len(prompt)
    assert added("decode-0", "handovers_total") == 1
    # The other choices share the full blocks, and have copies of the partial one and first tokens drawn on prefill.
    assert added("decode-0", "prompt_tokens_total") == 0
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


def test_a_streamed_chat_has_the_choices_of_a_whole_one(disaggregated: LocalCluster, tiny_qwen3: Path) -> None:
    client = openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": tiny_qwen3.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "n": 3, "seed": 5,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, ends = [""] * 3, []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices] and sorted(ends) == [0, 1, 2]
    with pytest.raises(openai.BadRequestError, match=r"n .*16") as caught:
        client.chat.completions.create(**{**asked, "n": 17})
    assert caught.value.param == "n"
