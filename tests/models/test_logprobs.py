"""Log-probabilities of the runner against transformers: raw, of drawn tokens and of prompts, in chunks and batches."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from cpu_runner import BLOCK_SIZE, make_runner, reference_model
from splitserve.kernels.reference.sampling import score_tokens
from splitserve.models.layers import decoder
from splitserve.models.runner.runner import NonFiniteLogitsError
from splitserve.models.sampling.logprobs import LOWEST, Scores, unpacked
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, ScoredTokens, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOP = 3
TOLERANCE = 1e-4


def expected(path: Path, token_ids: list[int]) -> Tensor:
    """Return log-probabilities [len(token_ids), vocab]: row i is of the token after token i."""
    with torch.inference_mode():
        return torch.log_softmax(reference_model(path)(torch.tensor([token_ids])).logits[0].float(), dim=1)


def assert_same(found: Logprobs, rows: Tensor, token_ids: list[int], num_top: int) -> None:
    assert found.num_positions == len(token_ids) and found.num_top == num_top
    for (values, top_ids), row, token_id in zip(found.rows(), rows, token_ids, strict=True):
        assert abs(values[0] - float(row[token_id])) < TOLERANCE
        best = row.topk(num_top).values
        assert torch.allclose(torch.tensor(values[1:]), best, atol=TOLERANCE)
        assert torch.allclose(row[top_ids], best, atol=TOLERANCE), "the alternatives are others"


def chunk(
    tokens: list[int], start: int, end: int, blocks: list[int], spec: SampleSpec | None, num_top: int | None
) -> ScheduledChunk:
    """A chunk that scores all that its rows can, from the third token of the prompt on."""
    first = max(start + 1, 2)
    scored = None if num_top is None else ScoredTokens(num_top, first - 1 - start, tokens[first : end + 1])
    return ScheduledChunk(tokens[start:end], start, blocks[: -(-end // BLOCK_SIZE)], spec, scored=scored)


@pytest.mark.parametrize("at_once", [128, 5])
def test_prompts_and_draws_have_the_raw_log_probabilities(
    tiny_qwen3: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, one of which scores none, beside draws with penalties: those don't show."""
    monkeypatch.setattr(decoder, "SCORED_ROWS_AT_ONCE", at_once)
    chosen = random.Random(5)
    first, second = ([chosen.randrange(300, 1500) for _ in range(length)] for length in (37, 21))
    runner = make_runner(tiny_qwen3)
    params = SamplingParams(max_tokens=9, repetition_penalty=3.0, logit_bias={7: 50.0})
    use = FeatureUse(1, FeatureStart(params, second, []))
    plain = SampleSpec(0.0, 0, 1.0, 0, 0, 37, num_top_logprobs=0)
    biased = SampleSpec(0.9, 0, 1.0, 4, 0, 21, use, NUM_TOP)
    begin = runner.run(StepPlan([chunk(first, 0, 20, [0, 1, 2], None, NUM_TOP)]))
    assert begin.draws == [None]
    assert_same(begin.scores[0], expected(tiny_qwen3, first)[1:20], first[2:21], NUM_TOP)
    rest = chunk(first, 20, 37, [0, 1, 2], plain, 1)
    output = runner.run(StepPlan([chunk(second, 0, 21, [3, 4], biased, None), rest]))
    assert output.scores.keys() == {1}
    assert_same(output.scores[1], expected(tiny_qwen3, first)[20:36], first[21:], 1)
    for draw, prompt, num_top in zip(output.draws, (second, first), (NUM_TOP, 0), strict=True):
        assert draw is not None and draw.logprobs is not None
        assert_same(draw.logprobs, expected(tiny_qwen3, prompt)[-1:], [draw.token_id], num_top)
    unasked = msgspec.structs.replace(rest, scored=None, sample=msgspec.structs.replace(plain, num_top_logprobs=None))
    again = runner.run(StepPlan([unasked]))
    assert again.draws[0] is not None and again.draws[0].logprobs is None and not again.scores


def test_numbers_survive_the_copy_to_the_host() -> None:
    logits = torch.randn(6, 50)
    logits[2, :2] = -torch.inf
    logits[2, 2], logits[2, 3:] = torch.finfo(torch.float32).min, 0.0
    scores = Scores.of(logits, torch.arange(6), 20, score_tokens)
    found = unpacked(scores.packed().numpy(), 6)
    for (values, top_ids), row, ids in zip(found.rows(), scores.values, scores.top_ids, strict=True):
        assert values == row.tolist() and top_ids == ids.tolist()
    assert found.rows()[2][0][0] == LOWEST and found.is_finite()


def test_a_prompt_without_finite_logits_fails_its_step(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    tokens = [400] * 20
    broken = chunk(tokens, 16, 19, [0, 1], None, 2)  # reads KV that nothing has written: NaN
    with pytest.raises(NonFiniteLogitsError) as error:
        runner.run(StepPlan([broken]))
    assert error.value.chunk_indices == (0,)
