"""Sampling features under the real scheduler: steps launched ahead, preemption, aborts; tokens as if drawn alone."""

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
import torch

from core_driver import DECODE, Worker, sent
from feature_examples import example_params, raw_logits, vocabulary
from splitserve.engine.effects import Effect
from splitserve.kernels.reference.sampling import sample
from splitserve.models.sampling.feature import BANNED, Feature, Rows
from splitserve.models.sampling.sampler import Sampler
from splitserve.protocol import sampling_features
from splitserve.protocol.messages.requests import Abort, LocalRequest, StepTokens
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.protocol.sampling_features import SAMPLING_FEATURES
from splitserve.protocol.step import (
    UNKNOWN_TOKEN,
    FeatureStart,
    FeatureUse,
    SampleSpec,
    ScheduledChunk,
    StepOutput,
    StepPlan,
)
from splitserve.simulation.model import ROUTER, VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

SamplerMaker = Callable[[], Sampler]


def new_sampler() -> Sampler:
    return Sampler(sample, VOCAB, torch.device("cpu"), vocabulary(VOCAB))


def run(sampler: Sampler, plan: StepPlan, before: StepOutput | None = None) -> StepOutput:
    """A step of a model whose logits depend on a sequence's seed and the position. ``before``: the output of the step
    launched before, which is over by the time at which a draw needs its tokens."""
    sampler.prepare(plan)
    specs = [chunk.sample for chunk in plan.chunks if chunk.sample is not None]
    if not specs:
        return StepOutput([None] * len(plan.chunks))
    logits = torch.stack([raw_logits(spec.seed, spec.position, VOCAB) for spec in specs])
    tokens = {} if before is None else {at: token for at, token in enumerate(before.token_ids) if token is not None}
    drawn = iter(sampler.draw(logits, plan.chunks, lambda: tokens).tolist())
    return StepOutput.of([None if chunk.sample is None else next(drawn) for chunk in plan.chunks])


def alone(prompt: list[int], params: SamplingParams, make: SamplerMaker) -> list[int]:
    """The output of a request whose states are made from its ids for each draw."""
    output: list[int] = []
    while True:
        position = len(prompt) + len(output)
        use = FeatureUse(1, FeatureStart(params, prompt, list(output)))
        spec = SampleSpec(params.temperature, params.top_k, params.top_p, params.seed, 0, position, use)
        token_id = run(make(), StepPlan([ScheduledChunk([0], position - 1, [0], spec)])).token_ids[0]
        assert token_id is not None
        output.append(token_id)
        if params.finish_reason(token_id, len(output)) is not None:
            return output


class Engine:
    """A mixed worker whose device may run a step ahead of the engine."""

    def __init__(self, make: SamplerMaker, num_blocks: int) -> None:
        self.worker = Worker(Role.MIXED, DECODE, num_blocks=num_blocks)
        self.sampler = make()
        self.plans: list[StepPlan] = []
        self.outputs: dict[RequestKey, list[int]] = {}
        self._launched: deque[StepOutput] = deque()
        self._last: StepOutput | None = None  # of the step launched last

    def submit(self, name: str, prompt: list[int], params: SamplingParams, output: list[int] | None = None) -> None:
        request = LocalRequest(RequestKey(name), prompt, params, 60.0, output or [])
        self._take(self.worker.hear(ROUTER, request))

    def turn(self, depth: int) -> bool:
        """Launch up to ``depth`` steps, commit one. Returns whether anything is left."""
        while len(self._launched) < depth and (plan := self.worker.plan()) is not None:
            self.plans.append(plan)
            self._last = run(self.sampler, plan, self._last)
            self._launched.append(self._last)
        if self._launched:
            self.worker.core.commit_step(self._launched.popleft(), self.worker.now)
        self._take(self.worker.tick())
        return bool(self._launched) or not self.worker.core.is_idle

    def _take(self, effects: list[Effect]) -> None:
        for body in sent(effects, StepTokens):
            for delta in body.deltas:  # type: ignore[attr-defined]
                self.outputs.setdefault(delta.key, []).extend(delta.token_ids)


def requests(features: list[str], count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    chance = random.Random(str(features))
    return {
        f"r{index}": (
            [chance.randrange(VOCAB) for _ in range(chance.randint(3, 9))],
            example_params(
                features if index % 3 else [],
                chance,
                VOCAB,
                temperature=chance.choice([0.0, 0.9]),
                max_tokens=14,
                stop_token_ids=(3, 7),
            ),
        )
        for index in range(count)
    }


@pytest.mark.parametrize("features", [*([name] for name in SAMPLING_FEATURES), list(SAMPLING_FEATURES)], ids="-".join)
def test_tokens_are_those_of_a_request_alone(features: list[str]) -> None:
    chance = random.Random(1)
    engine = Engine(new_sampler, num_blocks=9)
    submitted = requests(features, 7)
    for name, (prompt, params) in submitted.items():
        engine.submit(name, prompt, params)
        engine.turn(chance.randint(1, 2))
    while engine.turn(chance.randint(1, 2)):
        pass
    assert engine.worker.core.load().preemptions > 0
    assert any(chunk.token_ids[0] == UNKNOWN_TOKEN for plan in engine.plans for chunk in plan.chunks)
    for name, (prompt, params) in submitted.items():
        assert engine.outputs[RequestKey(name)] == alone(prompt, params, new_sampler), params
    engine.submit("last", [1, 2], SamplingParams(max_tokens=1))
    while engine.turn(1):
        pass
    assert engine.sampler.num_states == 0, "states of requests that have ended"


@pytest.mark.parametrize("features", [*([name] for name in SAMPLING_FEATURES), list(SAMPLING_FEATURES)], ids="-".join)
def test_a_worker_goes_on_from_the_output_of_another(features: list[str]) -> None:
    chance = random.Random(2)
    first, second = Engine(new_sampler, num_blocks=64), Engine(new_sampler, num_blocks=64)
    submitted = requests(features, 4)
    for name, (prompt, params) in submitted.items():
        first.submit(name, prompt, params)
    for _ in range(9):
        first.turn(2)
    moved = {}
    for name, (prompt, params) in submitted.items():
        delivered = first.outputs.get(RequestKey(name), [])
        if delivered and params.finish_reason(delivered[-1], len(delivered)) is None:
            moved[name] = delivered[: chance.randint(1, len(delivered))]
            second.submit(name, prompt, params, moved[name])
    assert moved
    while second.turn(chance.randint(1, 2)):
        pass
    for name, delivered in moved.items():
        prompt, params = submitted[name]
        assert delivered + second.outputs[RequestKey(name)] == alone(prompt, params, new_sampler)


def test_other_ranks_draw_the_same_tokens() -> None:
    """A plan as it goes to the other ranks: states begin, go on and end there as they do here."""
    engine, sampler = Engine(new_sampler, num_blocks=9), new_sampler()
    decoder = msgspec.msgpack.Decoder(StepPlan)
    for name, (prompt, params) in requests(list(SAMPLING_FEATURES), 5).items():
        engine.submit(name, prompt, params)
    while engine.turn(2):
        pass
    here, before = new_sampler(), None
    for plan in engine.plans:
        received = decoder.decode(msgspec.msgpack.encode(plan, enc_hook=list))
        there, before = run(sampler, received, before), run(here, plan, before)
        assert there == before
    assert sampler.num_states == here.num_states


def test_aborted_requests_leave_no_states() -> None:
    engine = Engine(new_sampler, num_blocks=32)
    for name, (prompt, params) in requests(["penalties"], 4).items():
        engine.submit(name, prompt, params)
        engine.turn(2)
    assert engine.sampler.num_states > 0
    for name in requests(["penalties"], 4):
        engine.worker.hear(ROUTER, Abort(RequestKey(name)))
    engine.submit("last", [1, 2], SamplingParams(max_tokens=2))
    while engine.turn(2):
        pass
    assert engine.sampler.num_states == 0
    engine.worker.assert_idle()


class LastBanned(Feature):
    """Bans the token that was drawn last, which it is told on the host, and checks that it is told all."""

    def __init__(self) -> None:
        super().__init__(VOCAB, torch.device("cpu"))
        self.token_ids: dict[int, list[int]] = {}

    def begin(self, slot: int, start: FeatureStart) -> None:
        self.token_ids[slot] = [*start.prompt_ids, *start.output_ids]

    def note_token(self, slot: int, token_id: int) -> None:
        self.token_ids[slot].append(token_id)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for draw in rows.draws:
            assert len(self.token_ids[draw.slot]) == draw.position
            logits[draw.row, self.token_ids[draw.slot][-1]] = BANNED


def test_a_feature_that_needs_the_last_token_gets_that_of_the_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = dataclasses.replace(SAMPLING_FEATURES["min_p"], needs_last_token=True)
    monkeypatch.setattr("splitserve.models.sampling.sampler.SAMPLING_FEATURES", {"min_p": declared})
    monkeypatch.setattr(sampling_features, "SAMPLING_FEATURES", {"min_p": declared})

    def with_ban() -> Sampler:
        sampler = new_sampler()
        sampler._features["min_p"] = LastBanned()
        return sampler

    engine = Engine(with_ban, num_blocks=9)
    submitted = requests(["min_p"], 7)
    for name, (prompt, params) in submitted.items():
        engine.submit(name, prompt, params)
    while engine.turn(2):
        pass
    ahead = [c.sample for plan in engine.plans for c in plan.chunks if c.token_ids[0] == UNKNOWN_TOKEN]
    assert any(spec is not None and spec.features is not None for spec in ahead)
    for name, (prompt, params) in submitted.items():
        output = engine.outputs[RequestKey(name)]
        assert output == alone(prompt, params, with_ban)
        if params.min_p:
            assert all(one != other for one, other in itertools.pairwise(output))
