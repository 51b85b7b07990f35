"""Several choices of a prompt on real clusters: the same tokens everywhere, one prefill and one hand-over for all."""

import json
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import complete_all, wait_until_quiet, worker_metrics
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


def test_eight_choices_cost_one_prefill_and_one_handover(disaggregated: LocalCluster, tiny_qwen3: Path) -> None:
    prompt = [number + 1 for number in PROMPT]
    before = wait_until_quiet(disaggregated.url)
    (answer,) = complete_all(disaggregated.url, [body(tiny_qwen3, prompt, n=8, **SAMPLED)], at_once=True)
    after = wait_until_quiet(disaggregated.url)

    def added(worker: str, name: str) -> float:
        return after[worker][name] - before[worker][name]

    assert added("prefill-0", "prompt_tokens_total") == len(prompt)
    assert added("decode-0", "handovers_total") == 1
    # Each of the other choices computes what follows the shared full blocks.
    assert added("decode-0", "prompt_tokens_total") == 7 * (len(prompt) % BLOCK_SIZE)
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


def test_after_the_loss_of_a_worker_only_unfinished_choices_go_on(tiny_qwen3: Path) -> None:
    """One of four choices ends early, at a token that no other one draws; then their decode worker is killed."""
    request = body(tiny_qwen3, PROMPT, n=4, max_tokens=400, ignore_eos=False, min_tokens=8, **SAMPLED)
    with cluster(tiny_qwen3, "2P2D", max_model_len=1024) as running:
        whole = choices_of(running.url, request)
        finished, stop = token_of_one_choice(whole)
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
        steps = ladder_steps(running.url)
        got = stream_and_kill(running, {**request, "stop_token_ids": [stop]}, finished)
        assert got == expected
        num_unfinished = sum(len(tokens) == max(map(len, expected)) for tokens in expected)
        assert ladder_steps(running.url) - steps == num_unfinished == 3, "each unfinished choice has one attempt more"


def token_of_one_choice(choices: list[list[int]]) -> tuple[int, int]:
    """Return the earliest token that only one of the choices has: the choice's index, and the token."""
    counts = Counter(token for tokens in choices for token in set(tokens))
    found = [
        (position, index, token)
        for index, tokens in enumerate(choices)
        for position, token in enumerate(tokens)
        if counts[token] == 1 and position >= 8
    ]
    _, index, token = min(found)
    return index, token


def stream_and_kill(running: LocalCluster, request: dict[str, Any], finished: int) -> list[list[int]]:
    """Stream the choices; once choice ``finished`` has ended, kill the decode worker that has the others."""
    got: list[list[int]] = [[] for _ in range(request["n"])]
    data = json.dumps(request | {"stream": True}).encode()
    asked = urllib.request.Request(f"{running.url}/v1/completions", data, {"Content-Type": "application/json"})
    is_killed = False
    with urllib.request.urlopen(asked, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                got[choice["index"]] += choice["token_ids"]
                if choice["index"] == finished and choice["finish_reason"] and not is_killed:
                    running.send_signal(decode_worker(running), signal.SIGKILL)
                    is_killed = True
    assert is_killed
    return got


def decode_worker(running: LocalCluster) -> str:
    """Return the decode worker whose requests are in flight."""
    in_flight = {name: each["requests_in_flight"] for name, each in worker_metrics(running.url).items()}
    return max((name for name in in_flight if name.startswith("decode")), key=lambda name: in_flight[name])


def ladder_steps(url: str) -> float:
    """Return the number of failed attempts so far."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = re.findall(r"^splitserve_ladder_steps_total\{.*\} (\S+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, lines))
