"""A worker of a model with sliding windows: its tokens are those of transformers, and its windows' blocks are few."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serving import Reference, transformers_greedy
from splitserve.engine.core import EngineCore
from splitserve.engine.effects import Send
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.models.parallel.ranks import Alone
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.requests import LocalRequest, StepTokens, TokenDelta
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.simulation.model import PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector
from splitserve.worker.build import BlockMemory, ModelBounds, build_core
from splitserve.worker.start.served_model import ServedModel, load_served_model
from window_checkpoints import OWN_SIZES, WINDOW, write_window_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ME = Party("mixed-0", 11)
BLOCK_SIZE = 16
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


class Worker:
    """A worker's core over a real model, in this process, without a loop."""

    def __init__(self, model: Path, *, num_blocks: int, max_num_seqs: int = 4) -> None:
        engine = EngineConfig(
            model=str(model),
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=48,
            max_num_seqs=max_num_seqs,
            max_model_len=400,
            kv_memory_bytes=4 * num_blocks * 2 * BLOCK_SIZE * 2 * 16 * 4,  # layers, K and V, heads, elements
        ).on("cpu")
        self.served: ServedModel = load_served_model(engine, CPU, Alone(), lambda _stage, _detail: None)
        memory = self.served.memory
        for view in memory.kernel_views:
            view.fill_(float("nan"))  # whatever is read without having been written shows
        config = WorkerConfig(engine_id=ME.engine_id, role=Role.MIXED, engine=engine, membership="", protocol=PROTOCOL)
        others = [group.generations for group in memory.groups[1:]]
        self.core: EngineCore = build_core(
            config,
            ME,
            BlockMemory(memory.layout, memory.generations, other_generations=others),
            SimConnector(ME, memory.num_blocks),  # type: ignore[arg-type]
            ModelBounds(self.served.max_model_len, self.served.vocab_size),
        )
        self.most_held = [0, 0]
        self.deltas: dict[int, list[TokenDelta]] = {}  # by the prompt's index
        self.numbers = itertools.count()

    @property
    def pools(self) -> list[int]:
        """The blocks that sequences hold, in each group."""
        return [pool.count(BlockState.REFERENCED) for pool in self.core.state.blocks.pools]

    def ask(self, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> None:
        for index, prompt in enumerate(prompts):
            request = LocalRequest(
                RequestKey(f"{next(self.numbers)}-{index}", 0),
                prompt,
                SamplingParams(max_tokens=max_tokens, temperature=0.0),
                60.0,
            )
            self.core.handle(Envelope(ROUTER, ME, request), 0.0)

    def run(self, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        """Return the tokens after each prompt, computed at once as far as there is room."""
        self.deltas = {index: [] for index in range(len(prompts))}
        self.ask(prompts, max_tokens)
        while self.step() is not None:
            pass
        assert self.pools == [0, 0]
        return [[token for delta in deltas for token in delta.token_ids] for deltas in self.deltas.values()]

    def step(self) -> object:
        """Run one step; None if there is nothing to run."""
        self.core.tick(0.0)
        plan = self.core.plan_step(0.0)
        self.most_held = [max(pair) for pair in zip(self.most_held, self.pools, strict=True)]
        if plan is not None:
            self.core.commit_step(self.served.runner.run(plan), 0.0)
            self.core.tick(0.0)
        self.core.check_invariants()
        for effect in self.core.take_effects():
            if isinstance(effect, Send) and isinstance(effect.body, StepTokens):
                for delta in effect.body.deltas:
                    self.deltas[int(delta.key.request_id.split("-")[1])].append(delta)
        return plan


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
def worker(checkpoint: tuple[Path, list[Reference]]) -> Iterator[Worker]:
    yield Worker(checkpoint[0], num_blocks=100)


@pytest.mark.parametrize("checkpoint", ALL, indirect=True, scope="module")
def test_tokens_of_chunks_prefixes_and_repetitions_are_those_of_transformers(
    worker: Worker, checkpoint: tuple[Path, list[Reference]]
) -> None:
    references = checkpoint[1]
    assert [group.kind for group in worker.served.memory.layout.groups] == ["full", "window"]
    for is_repeated in (False, True):
        for prompt, reference, tokens in zip(PROMPTS, references, worker.run(PROMPTS), strict=True):
            assert reference.agrees(tokens), f"repeated: {is_repeated}, prompt of {len(prompt)}: {tokens}"
        num_cached = [max(delta.num_cached_tokens for delta in deltas) for deltas in worker.deltas.values()]
        if is_repeated:
            wanted = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
            assert num_cached == wanted, "a repeated prompt is found up to its last token's block"
        else:
            assert num_cached[-1] >= BLOCK_SIZE, "the last two prompts share a prefix"


@pytest.mark.parametrize("checkpoint", ONE, indirect=True, scope="module")
def test_preempted_sequences_draw_the_same_tokens(checkpoint: tuple[Path, list[Reference]]) -> None:
    path, _ = checkpoint
    prompts = [prompt[:60] for prompt in PROMPTS]
    plenty, small = (Worker(path, num_blocks=number) for number in (100, 26))
    assert small.run(prompts, 100) == plenty.run(prompts, 100)
    assert small.core.state.counters.preemptions > 0 and plenty.core.state.counters.preemptions == 0


@pytest.mark.parametrize("checkpoint", ONE, indirect=True, scope="module")
def test_the_blocks_of_windows_stop_growing(worker: Worker) -> None:
    """A sequence that decodes past its window holds more and more full blocks, and no more window blocks."""
    worker.deltas = {0: []}
    worker.ask([PROMPTS[5]], max_tokens=300)
    held = []
    while worker.step() is not None:
        held.append(worker.pools)
    past = [counts for counts in held if counts[0] > TAIL_BLOCKS]
    assert past[-2][0] >= 300 // BLOCK_SIZE
    assert max(windows for _, windows in past) <= TAIL_BLOCKS
