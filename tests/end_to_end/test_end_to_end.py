"""Real clusters on this machine, over HTTP, ZMQ and NIXL: the same tokens everywhere, and nothing left behind."""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feature_references import feature_requests
from serving import Reference, complete_all, storm, transformers_greedy, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE, MAX_TOKENS, SHAPES, body, cluster
from splitserve.orchestration.cli.main import main
from splitserve.orchestration.cluster.launcher import LocalCluster
from waiting import wait_until


def make_prompts(vocab_size: int = 1500) -> list[list[int]]:
    """1 token, a block, a block + 1, several chunks, and prompts that share prefixes of several blocks."""
    chosen = random.Random(7)

    def draw(n: int) -> list[int]:
        return [chosen.randrange(300, vocab_size) for _ in range(n)]

    shared = draw(5 * BLOCK_SIZE)
    lengths = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 63, 64, 65, 150, 300, 401]
    return [*(draw(n) for n in lengths), shared, *(shared + draw(n) for n in (1, 16, 40)), shared[:33], shared[:32]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tiny_qwen3: Path, tiny_llama: Path) -> Iterator[tuple[LocalCluster, Path]]:
    """A cluster, and its checkpoint, of an architecture and a shape; it serves all tests that want just this one."""
    architecture, shape = request.param
    model = tiny_llama if architecture == "llama" else tiny_qwen3
    with cluster(model, shape) as started:
        yield started, model


EACH = [("qwen3", shape) for shape in SHAPES] + [("llama", "1P1D")]


@pytest.fixture(scope="module")
def references(tiny_qwen3: Path, tiny_llama: Path) -> dict[Path, list[Reference]]:
    found = {model: transformers_greedy(model, make_prompts(), MAX_TOKENS) for model in (tiny_qwen3, tiny_llama)}
    for of_model in found.values():
        num_tokens = len(of_model) * MAX_TOKENS
        assert sum(len(reference.near_ties) for reference in of_model) < 0.02 * num_tokens
    return found


@pytest.mark.parametrize(
    "running",
    [*EACH[:-1], pytest.param(EACH[-1], marks=pytest.mark.slow)],  # families are compared in one process, too
    indirect=True,
    ids="-".join,
    scope="module",
)
def test_greedy_tokens_are_those_of_transformers(
    running: tuple[LocalCluster, Path], references: dict[Path, list[Reference]]
) -> None:
    started, model = running
    prompts = make_prompts()
    bodies = [body(model, prompt) for prompt in prompts]
    assert len(bodies) == 16
    is_mixed = "mixed-0" in started.pids
    before = wait_until_quiet(started.url)
    for at_once in (False, True):
        answers = complete_all(started.url, bodies, at_once=at_once)
        for prompt, reference, answer in zip(prompts, references[model], answers, strict=True):
            assert answer["status"] == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            assert reference.agrees(tokens), f"at once {at_once}, prompt of {len(prompt)}: {tokens}"
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            assert answer["usage"]["completion_tokens"] == MAX_TOKENS
            assert answer["splitserve"]["mode"] == ("local" if is_mixed else "disaggregated")
    after = wait_until_quiet(started.url)
    if not is_mixed:
        done = sum(after[worker]["handovers_total"] - before[worker]["handovers_total"] for worker in after)
        assert done == 2 * len(prompts), "a request fell back to something else than its hand-over"
    assert all(worker["handover_failures_total"] == 0 for worker in after.values())


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[list[int]]]:
    """Tokens that were drawn, by shape."""
    return {}


@pytest.mark.parametrize("running", EACH[:2], indirect=True, ids="-".join, scope="module")
def test_drawn_tokens_depend_on_the_seed_alone(
    running: tuple[LocalCluster, Path], drawn: dict[str, list[list[int]]]
) -> None:
    started, model = running
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    bodies = [body(model, prompt, seed=100 + i, **options) for i, prompt in enumerate(make_prompts())]
    alone = complete_all(started.url, bodies, at_once=False)
    together = complete_all(started.url, bodies, at_once=True)
    tokens = [answer["choices"][0]["token_ids"] for answer in alone]
    assert tokens == [answer["choices"][0]["token_ids"] for answer in together]
    other_seed = complete_all(started.url, [{**bodies[-1], "seed": 999}], at_once=False)
    assert other_seed[0]["choices"][0]["token_ids"] != tokens[-1]
    drawn["mixed" if "mixed-0" in started.pids else "1P1D"] = tokens
    assert all(each == tokens for each in drawn.values()), "not by where it runs"


@pytest.mark.parametrize("running", EACH[:2], indirect=True, ids="-".join, scope="module")
def test_sampling_features_draw_the_tokens_of_transformers(running: tuple[LocalCluster, Path]) -> None:
    started, model = running
    wanted = feature_requests(model, make_prompts())
    bodies = [body(model, each.prompt, **each.options) for each in wanted]
    answers = complete_all(started.url, bodies, at_once=True)
    plain = complete_all(started.url, [body(model, each.prompt) for each in wanted], at_once=True)
    for each, answer, without in zip(wanted, answers, plain, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        assert each.reference.agrees(tokens), (each.options, tokens)
        assert tokens != without["choices"][0]["token_ids"], f"{each.options} has no effect here"


@pytest.mark.parametrize("running", EACH[1:2], indirect=True, ids="-".join, scope="module")
def test_requests_that_are_frozen_go_on_with_the_same_tokens(
    running: tuple[LocalCluster, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And a reset of the prefix caches meanwhile leaves the blocks that they hold."""
    started, model = running
    bodies = [body(model, prompt, max_tokens=150, seed=5) for prompt in make_prompts()]
    expected = complete_all(started.url, bodies, at_once=True)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.extend(complete_all(started.url, bodies, at_once=True)))
    client.start()
    wait_until(lambda: worker_metrics(started.url)["decode-0"]["num_running"] > 4)
    keep = ["pause", "--mode", "keep"]
    for arguments in (keep, ["resume", "--no-wait"], keep, keep, ["reset-prefix-cache"]):
        assert main([*arguments, "--against", started.url]) == 0
    first, resumed, paused, again, reset = capsys.readouterr().out.splitlines()
    assert first.startswith("paused (keep)") and resumed.startswith("not paused")
    assert paused == again and paused.startswith("paused (keep)"), "nothing moves"
    assert " requests are frozen, " in paused
    assert reset == "reset: decode-0, prefill-0"
    counts = [worker_metrics(started.url)["decode-0"] for _ in range(2)]
    assert counts[0]["frozen"] == 1 and counts[0]["blocks_referenced"] > 0
    assert counts[0]["output_tokens_total"] == counts[1]["output_tokens_total"]
    assert main(["resume", "--against", started.url]) == 0
    assert not any(values["frozen"] for values in worker_metrics(started.url).values()), "the command waits for them"
    client.join()
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
    for values in wait_until_quiet(started.url).values():
        assert values["frozen"] == 0
    again_answers = complete_all(started.url, bodies[-2:], at_once=False)
    assert again_answers[-1]["choices"][0]["token_ids"] == expected[-1]["choices"][0]["token_ids"]


@pytest.mark.parametrize("running", EACH[1:2], indirect=True, ids="-".join, scope="module")
def test_preemption_changes_no_token(running: tuple[LocalCluster, Path]) -> None:
    """A pool too small for all sequences at once: some are preempted and recomputed."""
    plenty, model = running
    features = [{}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5}, {"bad_words": ["e", "a"], "min_p": 0.1}]
    bodies = [
        body(model, prompt[:60], max_tokens=80, **features[index % 3]) for index, prompt in enumerate(make_prompts())
    ]
    with cluster(model, "1P1D", kv_memory_bytes=30 * 65536, max_model_len=256) as small:
        expected, answers = (complete_all(each.url, bodies, at_once=True) for each in (plenty, small))
        assert wait_until_quiet(small.url)["decode-0"]["preemptions_total"] > 0
    assert wait_until_quiet(plenty.url)["decode-0"]["preemptions_total"] == 0
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]


def test_hundreds_of_requests_with_a_third_aborted_leave_nothing(tiny_qwen3: Path) -> None:
    chosen = random.Random(3)
    prompts = make_prompts()
    bodies = [body(tiny_qwen3, chosen.choice(prompts), max_tokens=chosen.choice([1, 4, 16, 40])) for _ in range(400)]
    with cluster(tiny_qwen3, "1P1D", kv_memory_bytes=8 << 20, max_model_len=512) as running:
        finished = asyncio.run(storm(running.url, bodies[:200], 1 / 3, 24, seed=1))
        before = {worker: values["resident_bytes"] for worker, values in wait_until_quiet(running.url).items()}
        finished += asyncio.run(storm(running.url, bodies[200:], 1 / 3, 24, seed=2))
        after = wait_until_quiet(running.url)
        assert 240 < finished < 360, "about a third should have been aborted"
        for worker, values in after.items():
            assert values["blocks_free"] + values["blocks_cached"] == 128
            # GEMM primitives are cached per number of rows, so the first half is warm-up
            assert values["resident_bytes"] < before[worker] + (48 << 20), f"{worker} grew"
        # Of those that finish three in four have several tokens; of the aborted ones a slow machine hands over few.
        assert sum(values["handovers_total"] for values in worker_metrics(running.url).values()) > finished / 2
