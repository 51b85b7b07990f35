"""Sampled tokens follow the exact distribution: each parameter alone, and all pairs, on a small vocabulary."""

import itertools
import math
from typing import Any

import pytest
import torch

from feature_examples import vocabulary
from splitserve.kernels.reference.sampling import sample
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import Constraint
from splitserve.protocol.step import FeatureStart, FeatureUse, SampleSpec, ScheduledChunk, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

LOGITS = [2.0, 1.6, 1.2, 0.7, 0.1, -0.4, -1.0, -2.0]
VOCAB = len(LOGITS)
PROMPT, OUTPUT = [1, 6], [0, 3, 0, 2]
NUM_DRAWS = 1000
LIMIT = 45.0  # of chi-square with at most 7 degrees of freedom: about 1 in 7,000,000
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": -0.4},
    "logit_bias": {"logit_bias": {7: 3.0, 0: -100.0, 4: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 3, 5, 7)},
    "bad_words": {"bad_words": ((0, 2, 1), (2, 5), (3, 2, 3), (6,))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (2, 4)},
    "constraint": {"constraint": Constraint('start: "adac" /[acdf]{9}/', (6, 7))},  # the output's letters, then others
}
PAIRS = list(itertools.combinations(PARAMETERS, 2))


def exact(params: SamplingParams) -> list[float]:
    """Probabilities by plain arithmetic, in the documented order."""
    logits = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(LOGITS)]
    for token in set(PROMPT + OUTPUT):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    banned = {word[-1] for word in params.bad_words if (PROMPT + OUTPUT)[1 - len(word) or 99 :] == list(word[:-1])}
    if len(OUTPUT) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    if params.constraint:
        banned |= set(range(VOCAB)) - {0, 2, 3, 5}
    if params.allowed_token_ids:
        banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
    kept = {token: math.exp(logits[token] / params.temperature) for token in range(VOCAB) if token not in banned}
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p * max(kept.values())}
    ranked = sorted(kept, key=lambda token: -kept[token])[: params.top_k or VOCAB]
    total, reached, final = sum(kept[token] for token in ranked), 0.0, []
    for token in ranked:
        if reached < params.top_p * total:
            final.append(token)
        reached += kept[token]
    mass = sum(kept[token] for token in final)
    return [kept[token] / mass if token in final else 0.0 for token in range(VOCAB)]


@pytest.mark.parametrize("names", [*((name,) for name in PARAMETERS), *PAIRS], ids="+".join)
def test_draws_follow_the_exact_distribution(names: tuple[str, ...]) -> None:
    values = {key: value for name in names for key, value in PARAMETERS[name].items()}
    params = SamplingParams(**({"max_tokens": 99, "stop_token_ids": (2, 4), "seed": 5} | values))
    position = len(PROMPT) + len(OUTPUT)
    num_states = NUM_DRAWS if params.constraint else 1  # a grammar's state makes one mask at a time
    sampler = Sampler(sample, VOCAB, torch.device("cpu"), vocabulary(VOCAB))

    def chunk(choice: int, start: FeatureStart | None) -> ScheduledChunk:
        use = FeatureUse(choice % num_states, start)
        spec = SampleSpec(params.temperature, params.top_k, params.top_p, params.seed, choice, position, use)
        return ScheduledChunk([0], position - 1, [0], spec)

    start = FeatureStart(params, PROMPT, OUTPUT)
    sampler.prepare(StepPlan([chunk(choice, start) for choice in range(num_states)]))
    drawn = sampler.draw(torch.tensor([LOGITS] * NUM_DRAWS), [chunk(choice, None) for choice in range(NUM_DRAWS)])
    counts = torch.bincount(drawn, minlength=VOCAB).tolist()
    chi_square = 0.0
    for count, share in zip(counts, exact(params), strict=True):
        assert share > 0 or count == 0, (counts, exact(params))
        chi_square += (count - NUM_DRAWS * share) ** 2 / (NUM_DRAWS * share) if share else 0.0
    assert chi_square < LIMIT, (counts, exact(params))
