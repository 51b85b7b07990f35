"""Sampling features, all that are registered: pure functions of (request, output ids), in any batch, at any time."""

import random

import pytest
import torch
from torch import Tensor

from feature_examples import STOPS, example_params, raw_logits, vocabulary
from splitserve.kernels.reference.sampling import sample
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol.request import SamplingParams
from splitserve.protocol.sampling_features import NEUTRAL_VALUES, SAMPLING_FEATURES, wanted_features
from splitserve.protocol.step import (
    UNKNOWN_TOKEN,
    FeatureStart,
    FeatureUse,
    SampleSpec,
    ScheduledChunk,
    StepPlan,
)

VOCAB = 40
PROMPT = [3, 1, 4, 1, 5]
NUM_DRAWS = 12
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def new_sampler() -> Sampler:
    return Sampler(sample, VOCAB, CPU, vocabulary(VOCAB))


class Drawn:
    """A sequence whose tokens a test draws. ``state_id`` 0: it wants no feature."""

    def __init__(self, params: SamplingParams, state_id: int) -> None:
        self.params = params
        self.state_id = state_id
        self.output: list[int] = []

    def chunk(self, *, anew: bool, previous: int | None = None) -> ScheduledChunk:
        """``previous``: its chunk in the step before, whose token isn't known yet."""
        params, token_ids = self.params, [*PROMPT, *self.output]
        start = FeatureStart(params, PROMPT, list(self.output)) if anew else None
        use = FeatureUse(self.state_id, start) if wanted_features(params) else None
        position = len(token_ids)
        spec = SampleSpec(params.temperature, params.top_k, params.top_p, params.seed, 0, position, use)
        last = token_ids[-1] if previous is None else UNKNOWN_TOKEN
        return ScheduledChunk([last], position - 1, [0], spec, previous)


def draw(
    sampler: Sampler, sequences: list[Drawn], *, anew: bool, known: bool = True, released: tuple[int, ...] = ()
) -> None:
    """Draw a token each; unless ``known``, the sampler gets the last ones when it asks for them."""
    chunks = [each.chunk(anew=anew, previous=None if known else 7 + at) for at, each in enumerate(sequences)]
    plan = StepPlan(chunks, released)
    sampler.prepare(plan)
    before = {7 + at: sequence.output[-1] for at, sequence in enumerate(sequences) if not known}
    logits = torch.stack([raw_logits(each.params.seed, len(PROMPT) + len(each.output), VOCAB) for each in sequences])
    for sequence, token_id in zip(sequences, sampler.draw(logits, plan.chunks, lambda: before).tolist(), strict=True):
        sequence.output.append(token_id)


def alone(params: SamplingParams) -> list[int]:
    """The tokens of a sequence whose states are made from its ids for each draw."""
    sequence = Drawn(params, 1)
    for _ in range(NUM_DRAWS):
        draw(new_sampler(), [sequence], anew=True)
    return sequence.output


def states(sampler: Sampler, state_id: int) -> dict[str, object]:
    """The states of a sequence's features, to be compared."""
    kept = sampler._states[state_id]
    return {name: sampler._features[name].state(kept.slot) for name in kept.names}


@pytest.mark.parametrize("name", SAMPLING_FEATURES)
def test_a_state_made_at_once_is_one_carried_on_token_by_token(name: str) -> None:
    chance = random.Random(name)
    for _ in range(5):
        sequence = Drawn(example_params([name], chance, VOCAB), 1)
        sampler = new_sampler()
        for position in range(NUM_DRAWS):
            draw(sampler, [sequence], anew=position == 0)
        rebuilt = new_sampler()
        rebuilt.prepare(StepPlan([sequence.chunk(anew=True)]))
        sampler.prepare(StepPlan([sequence.chunk(anew=False)]))
        assert states(sampler, 1) == states(rebuilt, 1)


@pytest.mark.parametrize("name", SAMPLING_FEATURES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_depend_on_nothing_but_the_request_and_its_output(name: str, temperature: float) -> None:
    """Sequences that come and go, are moved to another worker, and are drawn ahead of the host's knowledge."""
    chance = random.Random(name)
    params = [example_params([name], chance, VOCAB, temperature=temperature) for _ in range(3)]
    params += [SamplingParams(max_tokens=100, seed=7, temperature=temperature)]
    params += [example_params(list(SAMPLING_FEATURES), chance, VOCAB, temperature=temperature)]
    sequences = [Drawn(each, state_id) for state_id, each in enumerate(params, start=1)]
    samplers = [new_sampler(), new_sampler()]
    where: dict[int, Sampler] = {}
    while running := [each for each in sequences if len(each.output) < NUM_DRAWS]:
        chosen = chance.sample(running, chance.randint(1, len(running)))
        for sampler in samplers:
            here = [each for each in chosen if where.get(each.state_id) is sampler]
            if here:
                draw(sampler, here, anew=False, known=chance.random() < 0.3)
        moving = [each for each in chosen if each.state_id not in where or chance.random() < 0.2]
        if moving:
            target = chance.choice(samplers)
            gone = tuple(each.state_id for each in moving if where.get(each.state_id) not in (None, target))
            other = next(sampler for sampler in samplers if sampler is not target)
            other.prepare(StepPlan([], gone))
            draw(target, moving, anew=True)
            where |= {each.state_id: target for each in moving}
    for sequence in sequences:
        assert sequence.output[:NUM_DRAWS] == alone(sequence.params)
    for sampler in samplers:
        sampler.prepare(StepPlan([], tuple(each.state_id for each in sequences)))
        assert sampler.num_states == 0


@pytest.mark.parametrize("name", SAMPLING_FEATURES)
def test_a_feature_changes_some_draw(name: str) -> None:
    chance = random.Random(name)
    tried = [example_params([name], chance, VOCAB, temperature=1.5) for _ in range(20)]
    plain = [SamplingParams(100, temperature=1.5, seed=each.seed, stop_token_ids=STOPS) for each in tried]
    assert any(alone(one) != alone(other) for one, other in zip(tried, plain, strict=True))


def test_every_parameter_belongs_to_one_feature() -> None:
    params = [param for feature in SAMPLING_FEATURES.values() for param in feature.params]
    assert sorted(params) == sorted(NEUTRAL_VALUES)


def test_a_request_without_features_passes_its_logits_on_untouched() -> None:
    given: list[Tensor] = []

    def noted(logits: Tensor, _batch: object) -> Tensor:
        given.append(logits)
        return torch.zeros(len(logits), dtype=torch.int64)

    logits = torch.randn(2, VOCAB, dtype=torch.bfloat16)
    before = logits.clone()
    sequences = [Drawn(SamplingParams(max_tokens=1), 0)] * 2
    plan = StepPlan([sequence.chunk(anew=False) for sequence in sequences])
    sampler = Sampler(noted, VOCAB, CPU)  # type: ignore[arg-type]
    sampler.prepare(plan)
    sampler.draw(logits, plan.chunks)
    assert given[0] is logits and torch.equal(logits, before) and sampler.num_states == 0
