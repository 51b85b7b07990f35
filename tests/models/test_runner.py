"""The runner against transformers' ``generate``, token by token: architectures, chunks, batches, shared prefixes."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpu_runner import BLOCK_SIZE, make_runner, reference_model
from splitserve.models.config import load_model_config
from splitserve.models.layers.rotary import inverse_frequencies
from splitserve.models.runner.runner import ModelRunner, NonFiniteLogitsError
from splitserve.protocol.step import Draw, SampleSpec, ScheduledChunk, StepOutput, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW_TOKENS = 24
NEAR_TIE = 1e-4
CPU = torch.device("cpu")


def greedy(position: int) -> SampleSpec:
    return SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=position)


class Scheduled:
    """A sequence that a test schedules by hand."""

    def __init__(self, prompt: list[int], blocks: list[int], num_computed: int = 0) -> None:
        self.num_prompt = len(prompt)
        self.tokens = list(prompt)
        self.blocks = blocks
        self.num_computed = num_computed

    def chunk(self, budget: int) -> ScheduledChunk:
        end = min(self.num_computed + budget, len(self.tokens))
        spec = greedy(end) if end == len(self.tokens) else None
        covering = self.blocks[: -(-end // BLOCK_SIZE)]
        return ScheduledChunk(self.tokens[self.num_computed : end], self.num_computed, covering, spec)

    def apply(self, chunk: ScheduledChunk, token_id: int | None) -> None:
        self.num_computed += len(chunk.token_ids)
        assert (token_id is None) == (chunk.sample is None)
        if token_id is not None:
            self.tokens.append(token_id)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def step(runner: ModelRunner, sequences: Sequence[Scheduled], budget: int) -> None:
    chunks = [sequence.chunk(budget) for sequence in sequences]
    output = runner.run(StepPlan(chunks))
    for sequence, chunk, token_id in zip(sequences, chunks, output.token_ids, strict=True):
        sequence.apply(chunk, token_id)


def finish(runner: ModelRunner, sequences: Sequence[Scheduled], budget: int, count: int = NUM_NEW_TOKENS) -> None:
    while running := [sequence for sequence in sequences if len(sequence.output) < count]:
        step(runner, running, budget)


def reference_scores(path: Path, prompt: list[int], count: int = NUM_NEW_TOKENS) -> tuple[list[int], list[Tensor]]:
    output = reference_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), [logits[0] for logits in output.logits]


def assert_same_tokens(path: Path, prompt: list[int], actual: list[int]) -> None:
    """Equal to transformers, up to the first near-tie of the reference's own two best logits (if there is one)."""
    expected, logits = reference_scores(path, prompt, len(actual))
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        best = logits[index].topk(2).values
        if left != right:
            assert float(best[0] - best[1]) < NEAR_TIE, (index, actual, expected)
            return


@pytest.fixture(params=["qwen3", "llama"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(2048) for _ in range(num_tokens)]


def shuffled_blocks(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(128), count)


@pytest.mark.parametrize("budget", [512, 13])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
def test_alone(checkpoint: Path, num_tokens: int, budget: int) -> None:
    runner = make_runner(checkpoint)
    prompt = random_prompt(num_tokens, num_tokens)
    sequence = Scheduled(prompt, shuffled_blocks(8, num_tokens))
    finish(runner, [sequence], budget)
    assert_same_tokens(checkpoint, prompt, sequence.output)


def test_a_batch_of_sixteen_that_join_at_different_times(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    lengths = [1, 16, 17, 40, 64, 3, 33, 2, 48, 5, 31, 32, 80, 1, 16, 9]
    blocks = shuffled_blocks(128, 0)
    waiting = [
        Scheduled(random_prompt(length, index), blocks[8 * index : 8 * index + 8])
        for index, length in enumerate(lengths)
    ]
    sequences = list(waiting)
    running: list[Scheduled] = []
    while waiting or any(len(sequence.output) < NUM_NEW_TOKENS for sequence in running):
        running += [waiting.pop(0) for _ in range(min(2, len(waiting)))]
        active = [sequence for sequence in running if len(sequence.output) < NUM_NEW_TOKENS]
        # Decode tokens first, as schedulers order them, then chunks of at most 19 tokens.
        active.sort(key=lambda sequence: len(sequence.tokens) - sequence.num_computed > 1)
        step(runner, active, 19)
    for sequence in sequences:
        assert_same_tokens(checkpoint, sequence.tokens[: sequence.num_prompt], sequence.output)


@pytest.mark.parametrize("num_shared", [16, 64, 79])
def test_a_prefix_that_another_sequence_computed_is_reused(checkpoint: Path, num_shared: int) -> None:
    runner = make_runner(checkpoint)
    shared = random_prompt(num_shared, 1)
    owner = Scheduled(shared + random_prompt(10, 2), list(range(20, 28)))
    finish(runner, [owner], 512)
    num_cached = num_shared // BLOCK_SIZE * BLOCK_SIZE
    cached_blocks = owner.blocks[: num_cached // BLOCK_SIZE]
    prompt = shared + random_prompt(7, 3)
    reuser = Scheduled(prompt, [*cached_blocks, *range(40, 48)], num_cached)
    finish(runner, [reuser], 512)
    assert_same_tokens(checkpoint, prompt, reuser.output)


def test_a_chunk_that_samples_nothing_yields_none_and_still_writes_its_kv(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    output = runner.run(StepPlan([ScheduledChunk([5, 6, 7], 0, [9], None)]))
    assert output.draws == output.token_ids == [None]
    written = runner.cache.groups[0][9, :, :, :, :3]
    assert bool(written.isfinite().all()) and bool(runner.cache.groups[0][9, :, :, :, 3:].isnan().all())
    assert bool(runner.cache.groups[0][:9].isnan().all()) and bool(runner.cache.groups[0][10:].isnan().all())


def test_a_draw_of_several_tokens_has_no_single_one() -> None:
    assert StepOutput.of([7, None]) == StepOutput([Draw((7,)), None])
    assert StepOutput.of([7, None]).token_ids == [7, None]
    with pytest.raises(ValueError, match="too many values"):
        _ = StepOutput([Draw((7, 8))]).token_ids


def test_sampled_tokens_do_not_depend_on_the_batch_or_the_chunks(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    prompt = random_prompt(20, 5)
    spec = SampleSpec(temperature=0.8, top_k=50, top_p=0.95, seed=77, choice=0, position=20)
    (draw,) = runner.run(StepPlan([ScheduledChunk(prompt, 0, [1, 2], spec)])).draws
    assert draw is not None and draw.logprobs is None
    alone = draw.token_id
    runner.run(StepPlan([ScheduledChunk(prompt[:19], 0, [3, 4], None)]))
    others = [ScheduledChunk(random_prompt(5, seed), 0, [10 + seed], greedy(5)) for seed in range(4)]
    last = ScheduledChunk(prompt[19:], 19, [3, 4], spec)
    assert runner.run(StepPlan([last, *others])).token_ids[0] == alone


def test_bfloat16_stays_close_to_float32(checkpoint: Path) -> None:
    """Logits within bf16 rounding: the token that bf16 takes is nearly as likely in float32."""
    prompt = random_prompt(50, 8)
    runner = make_runner(checkpoint, dtype=torch.bfloat16)
    sequence = Scheduled(prompt, list(range(4)))
    finish(runner, [sequence], 512, count=1)
    _, logits = reference_scores(checkpoint, prompt, 1)
    deviation = float(logits[0].std())
    assert float(logits[0].max() - logits[0][sequence.output[0]]) < 0.25 * deviation


def test_weights_that_overflow_end_the_step_with_an_error(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    fine = ScheduledChunk([5, 6], 0, [0], greedy(2))
    unwritten = ScheduledChunk([7], 3, [1], greedy(4))  # its context was never computed: NaN
    with pytest.raises(NonFiniteLogitsError, match="float32") as caught:
        runner.run(StepPlan([fine, ScheduledChunk([1, 2], 0, [2], None), unwritten]))
    assert caught.value.chunk_indices == (2,)


def test_a_kv_cache_that_does_not_fit_the_model_is_refused(tiny_qwen3: Path) -> None:
    model = make_runner(tiny_qwen3).model
    with pytest.raises(ValueError, match=r"\[num_blocks, 4, 4, 2, block_size, 32\]"):
        ModelRunner(model, torch.zeros(3, 4, 4, 2, 16, 64))
    with pytest.raises(ValueError, match="bfloat16"):
        ModelRunner(model, torch.zeros(3, 4, 4, 2, 16, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama"])
def test_rotary_frequencies_are_those_of_transformers(request: pytest.FixtureRequest, name: str) -> None:
    path = request.getfixturevalue(name)
    expected = reference_model(path).model.rotary_emb.inv_freq
    torch.testing.assert_close(inverse_frequencies(load_model_config(path)), expected, rtol=1e-6, atol=0)
