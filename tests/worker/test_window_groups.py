"""A worker of a model with sliding windows: its tokens are those of transformers, and its windows' blocks are few."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_worker import BLOCK_SIZE, CoreWorker
from serving import Reference, transformers_greedy
from splitserve.models.config import load_model_config
from splitserve.models.step_costs import kv_token_elements
from window_checkpoints import OWN_SIZES, WINDOW, write_window_model

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 20
TAIL_BLOCKS = -(-(WINDOW - 1) // BLOCK_SIZE) + 1  # the most that a token's window touches


def make_prompts() -> list[list[int]]:
    """Prompts around the sizes of a block and the window, of several chunks, and two with a common prefix."""
    chosen = random.Random(7)

    def draw(count: int) -> list[int]:
        return [chosen.randrange(300, 1500) for _ in range(count)]

    shared = draw(80)
    lengths = (1, 15, 17, WINDOW - 1, WINDOW, WINDOW + 1, 150, 301)
    return [*(draw(length) for length in lengths), shared + draw(3), shared + draw(40)]


PROMPTS = make_prompts()


def make_worker(model: Path, *, num_blocks: int) -> CoreWorker:
    return CoreWorker(model, kv_bytes=num_blocks * BLOCK_SIZE * 4 * kv_token_elements(load_model_config(model)))


ALIKE = ("Gemma2ForCausalLM", "Olmo3ForCausalLM")  # their groups are those of Gemma 3
ALL = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in OWN_SIZES]
ONE = ["Gemma3ForCausalLM"]


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Reference]]:
    path = tmp_path_factory.mktemp("windows") / request.param
    write_window_model(path, request.param, tiny_qwen3)
    return path, transformers_greedy(path, PROMPTS, MAX_TOKENS)


@pytest.fixture
def worker(checkpoint: tuple[Path, list[Reference]]) -> Iterator[CoreWorker]:
    yield make_worker(checkpoint[0], num_blocks=100)


@pytest.mark.parametrize("checkpoint", ALL, indirect=True, scope="module")
def test_tokens_of_chunks_prefixes_and_repetitions_are_those_of_transformers(
    worker: CoreWorker, checkpoint: tuple[Path, list[Reference]]
) -> None:
    references = checkpoint[1]
    assert [group.kind for group in worker.served.memory.layout.groups] == ["full", "window"]
    for is_repeated in (False, True):
        for prompt, reference, tokens in zip(PROMPTS, references, worker.run(PROMPTS, MAX_TOKENS), strict=True):
            assert reference.agrees(tokens), f"repeated: {is_repeated}, prompt of {len(prompt)}: {tokens}"
        num_cached = worker.num_cached_tokens
        if is_repeated:
            wanted = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
            assert num_cached == wanted, "a repeated prompt is found up to its last token's block"
        else:
            assert num_cached[-1] >= BLOCK_SIZE, "the last two prompts share a prefix"


@pytest.mark.parametrize("checkpoint", ONE, indirect=True, scope="module")
def test_preempted_sequences_draw_the_same_tokens(checkpoint: tuple[Path, list[Reference]]) -> None:
    path, _ = checkpoint
    prompts = [prompt[:60] for prompt in PROMPTS]
    plenty, small = (make_worker(path, num_blocks=number) for number in (100, 26))
    assert small.run(prompts, 60) == plenty.run(prompts, 60)
    assert small.core.state.counters.preemptions > 0 and plenty.core.state.counters.preemptions == 0


@pytest.mark.parametrize("checkpoint", ONE, indirect=True, scope="module")
def test_the_blocks_of_windows_stop_growing(worker: CoreWorker) -> None:
    """A sequence that decodes past its window holds more and more full blocks, and no more window blocks."""
    worker.deltas = {0: []}
    worker.ask([PROMPTS[5]], max_tokens=300)
    held = []
    while worker.step() is not None:
        held.append(worker.pools)
    past = [counts for counts in held if counts[0] > TAIL_BLOCKS]
    assert past[-2][0] >= 300 // BLOCK_SIZE
    assert max(windows for _, windows in past) <= TAIL_BLOCKS
