"""Log-probabilities of real clusters, over HTTP, are those of transformers: of outputs and prompts, streamed or not."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch import Tensor

from cpu_runner import reference_model
from serving import complete_all, wait_until_quiet
from small_clusters import BLOCK_SIZE, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster

TOLERANCE = 1e-4
NUM_TOP = 2


@pytest.fixture(scope="module", params=["1P1D", "mixed"])
def running(request: pytest.FixtureRequest, tiny_qwen3: Path) -> Iterator[tuple[LocalCluster, Path]]:
    with cluster(tiny_qwen3, request.param) as started:
        yield started, tiny_qwen3


def make_prompts() -> list[list[int]]:
    """One token, a block, several chunks, and prompts with a common prefix of several blocks."""
    chosen = random.Random(11)
    shared = [chosen.randrange(300, 1500) for _ in range(5 * BLOCK_SIZE)]
    lengths = (1, BLOCK_SIZE, BLOCK_SIZE + 1, 150)
    alone = [[chosen.randrange(300, 1500) for _ in range(length)] for length in lengths]
    return [*alone, shared, shared + shared[:9]]


def expected(model: Path, token_ids: list[int]) -> Tensor:
    """Return log-probabilities [len(token_ids), vocab]: row i is of token i; the first row is empty."""
    with torch.inference_mode():
        rows = torch.log_softmax(reference_model(model)(torch.tensor([token_ids])).logits[0].float(), dim=1)
    return torch.cat((torch.full_like(rows[:1], torch.nan), rows[:-1]))


def assert_output(model: Path, prompt: list[int], output: list[int], logprobs: dict[str, Any], num_top: int) -> None:
    """Check an object in the form of completions, without echo."""
    rows = expected(model, [*prompt, *output])[len(prompt) :]
    assert [len(each) for each in logprobs.values()] == [len(output)] * 4
    for row, token_id, value, top in zip(
        rows, output, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert abs(value - float(row[token_id])) < TOLERANCE
        best = float(row.max()) if num_top else value
        assert abs(max(top.values()) - best) < TOLERANCE and len(top) <= num_top + 1


async def stream(url: str, request: dict[str, Any], begun: asyncio.Semaphore | None = None) -> list[dict[str, Any]]:
    """Return all chunks. ``begun`` is released at the first one."""
    chunks: list[dict[str, Any]] = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=request | {"stream": True}) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                if begun is not None and not chunks:
                    begun.release()
                chunks.append(json.loads(line.removeprefix(b"data: ")))
    return chunks


def test_outputs(running: tuple[LocalCluster, Path]) -> None:
    """Raw ones, whatever parameters change the draws; and those of a stream, one entry for each token."""
    started, model = running
    options: dict[str, Any] = {"logprobs": NUM_TOP, "temperature": 0.8, "top_k": 20, "presence_penalty": 1.0}
    bodies = [body(model, prompt, max_tokens=8, seed=3, **options) for prompt in make_prompts()]
    for request, answer in zip(bodies, complete_all(started.url, bodies, at_once=True), strict=True):
        choice = answer["choices"][0]
        assert_output(model, request["prompt"], choice["token_ids"], choice["logprobs"], NUM_TOP)
        assert choice["logprobs"]["text_offset"][0] == 0
    chunks = asyncio.run(stream(started.url, bodies[3]))
    output = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert output == answer_tokens(started.url, bodies[3])
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    joined = {name: [each for part in parts for each in part[name]] for name in parts[0]}
    assert_output(model, bodies[3]["prompt"], output, joined, NUM_TOP)


def answer_tokens(url: str, request: dict[str, Any]) -> list[int]:
    tokens: list[int] = complete_all(url, [request], at_once=False)[0]["choices"][0]["token_ids"]
    return tokens


def assert_prompt(model: Path, prompt: list[int], found: list[Any], num_top: int) -> None:
    """Check an object in the form of ``prompt_logprobs``."""
    rows = expected(model, prompt)
    assert found[0] is None and len(found) == len(prompt)
    for row, token_id, entry in zip(rows[1:], prompt[1:], found[1:], strict=True):
        assert len(entry) in (num_top, num_top + 1)
        for each, described in entry.items():
            assert abs(described["logprob"] - float(row[int(each)])) < TOLERANCE
        ranks = sorted(described["rank"] for described in entry.values() if described["rank"] is not None)
        assert ranks == list(range(1, num_top + 1)) and str(token_id) in entry


def test_prompts_in_chunks_and_after_prefix_hits(running: tuple[LocalCluster, Path]) -> None:
    started, model = running
    bodies = [body(model, prompt, max_tokens=3) for prompt in make_prompts()]
    complete_all(started.url, bodies, at_once=False)  # their KV is cached now
    wanted = [request | {"prompt_logprobs": NUM_TOP} for request in bodies]
    plain, scored = (complete_all(started.url, each, at_once=True) for each in (bodies, wanted))
    for request, without, answer in zip(bodies, plain, scored, strict=True):
        choice = answer["choices"][0]
        assert_prompt(model, request["prompt"], choice["prompt_logprobs"], NUM_TOP)
        assert choice["logprobs"] is None and choice["token_ids"] == without["choices"][0]["token_ids"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chunks = asyncio.run(stream(started.url, wanted[3]))
    assert_prompt(model, wanted[3]["prompt"], chunks[0]["choices"][0]["prompt_logprobs"], NUM_TOP)
    assert all("prompt_logprobs" not in chunk["choices"][0] for chunk in chunks[1:])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_of_several_prompts_as_evaluations_want_it(running: tuple[LocalCluster, Path], max_tokens: int) -> None:
    """The sum over a continuation, and whether it is the greedy one, as lm-eval computes them; without hand-overs."""
    started, model = running
    prompts = make_prompts()
    before = wait_until_quiet(started.url)
    request = {"model": model.name, "prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1}
    [answer] = complete_all(started.url, [request | {"temperature": 0}], at_once=False)
    after = wait_until_quiet(started.url)
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    assert [after[each]["handovers_total"] for each in after] == [before[each]["handovers_total"] for each in after]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs, rows = choice["logprobs"], expected(model, prompt)
        assert len(logprobs["tokens"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert logprobs["text_offset"][-1] <= len(choice["text"])
        for row, token_id, value, top in zip(
            rows[1:], prompt[1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=False
        ):
            assert abs(value - float(row[token_id])) < TOLERANCE
            assert (value == max(top.values())) == (int(row.argmax()) == token_id)


def test_a_chat(running: tuple[LocalCluster, Path]) -> None:
    openai = pytest.importorskip("openai")
    started, model = running
    client = openai.OpenAI(base_url=f"{started.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob
        assert entry.bytes is None or entry.token.startswith("bytes:") or bytes(entry.bytes).decode() == entry.token
    last = client.completions.create(model=model.name, prompt="hello", max_tokens=2, logprobs=1, echo=True)
    assert last.choices[0].text.startswith("hello") and last.choices[0].logprobs.token_logprobs[0] is None


def test_workers_that_die_cost_no_log_probability_and_change_none(tiny_qwen3: Path) -> None:
    """Streams go on on other workers: one entry for each token, the same values."""
    chosen = random.Random(2)
    prompts = [[chosen.randrange(300, 1500) for _ in range(200)] for _ in range(8)]
    wanted: dict[str, Any] = {"max_tokens": 60, "logprobs": NUM_TOP, "prompt_logprobs": 0}
    bodies = [body(tiny_qwen3, prompt, **wanted) for prompt in prompts]
    with cluster(tiny_qwen3, "2P2D") as started:

        async def run() -> list[list[dict[str, Any]]]:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(stream(started.url, request, begun)) for request in bodies]
            for worker, num_more in (("prefill-0", 1), ("decode-0", len(bodies) // 2)):
                for _ in range(num_more):
                    await begun.acquire()
                os.kill(started.pids[worker], signal.SIGKILL)
            return await asyncio.gather(*streams)

        answers = asyncio.run(run())
    num_moved = 0
    for request, chunks in zip(bodies, answers, strict=True):
        assert not any("error" in chunk for chunk in chunks), chunks[-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        output = [token_id for choice in choices for token_id in choice["token_ids"]]
        joined: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values)
        assert_output(tiny_qwen3, request["prompt"], output, joined, NUM_TOP)
        assert_prompt(tiny_qwen3, request["prompt"], choices[0]["prompt_logprobs"], 0)
        num_moved += chunks[-1]["splitserve"]["attempts"] > 1
    assert num_moved > 0, "no request lost a worker"
