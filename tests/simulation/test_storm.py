"""The storm: requests with random mixes of all features, while workers die, freeze, drain and preempt.

``scripts/long-tests storm-simulated`` does the same with 10,000 requests.
"""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from planted import WRONG_TOKENS, Plant, find
from splitserve.engine.feature_states import FeatureStates
from splitserve.models.sampling.features.allowed_tokens import AllowedTokens
from splitserve.models.sampling.features.penalties import HostPenalties, Penalties
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.request import Party, SamplingParams
from splitserve.protocol.sampling_features import NEUTRAL_VALUES
from splitserve.protocol.step import FeatureStart, FeatureUse
from splitserve.router.output.splitter import Splitter
from splitserve.router.requests.attempts import Attempts
from storms import FEATURES, checked_figures, run_storm, storm_schedules

UNMATCHED = "the output doesn't match the grammar"
NUM_REQUESTS = 90
NUM_SCHEDULES = 60

pytestmark = pytest.mark.usefixtures("one_thread")


def test_answers_in_a_storm_are_those_of_an_undisturbed_worker() -> None:
    """``run_storm`` compares tokens, log-probabilities and messages; here it's checked that the storm was one."""
    found = run_storm(NUM_REQUESTS)
    assert not [name for name in NEUTRAL_VALUES if found[f"with {name}"] < NUM_REQUESTS // 10]
    assert not [name for name in FEATURES if found[f"with {name}"] < NUM_REQUESTS // 60]
    assert found["lost a worker between first and last token"] > NUM_REQUESTS // 20
    assert found["lost a worker or a read during a hand-over"] > NUM_REQUESTS // 40
    assert found["preemptions"] > NUM_REQUESTS // 20


Start = Callable[[list[int], list[int]], tuple[list[int], list[int]]]


def started_from(patch: pytest.MonkeyPatch, changed: Start) -> None:
    """Make states from other prompt and output ids where there is output already: after a move or a preemption."""
    original = FeatureStates.use

    def use(self: FeatureStates, *args: Any) -> FeatureUse:
        made = original(self, *args)
        if made.start is None or not made.start.output_ids:
            return made
        start = made.start
        return FeatureUse(made.state_id, FeatureStart(start.params, *changed([*start.prompt_ids], [*start.output_ids])))

    patch.setattr(FeatureStates, "use", use)


def states_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    started_from(patch, lambda prompt, output: (prompt, []))


def last_token_counted_twice(patch: pytest.MonkeyPatch) -> None:
    started_from(patch, lambda prompt, output: (prompt, [*output, output[-1]]))


def min_tokens_counted_from_the_attempt(patch: pytest.MonkeyPatch) -> None:
    started_from(patch, lambda prompt, output: ([*prompt, *output], []))


def sent_with(patch: pytest.MonkeyPatch, changed: Callable[[SamplingParams, int], SamplingParams]) -> None:
    """Send a later attempt with other parameters."""
    original = Attempts.messages

    def messages(self: Attempts, *args: Any, **options: Any) -> list[tuple[Party, Body]]:
        sent = original(self, *args, **options)
        return [(to, _replaced(body, changed)) for to, body in sent]

    patch.setattr(Attempts, "messages", messages)


def _replaced(body: Any, changed: Callable[[SamplingParams, int], SamplingParams]) -> Any:
    return msgspec.structs.replace(body, sampling=changed(body.sampling, body.key.attempt))


def seeds_of_attempts(patch: pytest.MonkeyPatch) -> None:
    sent_with(patch, lambda params, attempt: msgspec.structs.replace(params, seed=(params.seed + attempt) % 2**64))


def biases_lost_on_a_retry(patch: pytest.MonkeyPatch) -> None:
    sent_with(patch, lambda params, attempt: msgspec.structs.replace(params, logit_bias={}) if attempt else params)


def masks_of_the_request_before(patch: pytest.MonkeyPatch) -> None:
    def begin(self: AllowedTokens, slot: int, start: FeatureStart) -> None:
        self._allowed.reserve(slot + 1)
        self._allowed.row(slot)[list(start.params.allowed_token_ids)] = True

    patch.setattr(AllowedTokens, "begin", begin)


def counts_of_the_request_before(patch: pytest.MonkeyPatch) -> None:
    original = HostPenalties.begin
    last_outputs: dict[int, list[int]] = {}  # by slot

    def begin(self: HostPenalties, slot: int, start: FeatureStart) -> None:
        original(self, slot, start)
        for token_id in last_outputs.get(slot, ()):
            self._occurrences[slot].count(token_id)
        last_outputs[slot] = list(start.output_ids)

    patch.setattr(HostPenalties, "begin", begin)


def tokens_not_counted_on_a_second_draw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Penalties, "advance", lambda self, rows, drawn: None)


@pytest.mark.parametrize(
    "plant",
    [
        states_not_rebuilt,
        last_token_counted_twice,
        min_tokens_counted_from_the_attempt,
        seeds_of_attempts,
        *(
            pytest.param(plant, marks=pytest.mark.slow)
            for plant in (
                biases_lost_on_a_retry,
                masks_of_the_request_before,
                counts_of_the_request_before,
                tokens_not_counted_on_a_second_draw,
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_storm_finds_a_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    find(itertools.islice(storm_schedules(), NUM_SCHEDULES), WRONG_TOKENS, UNMATCHED, plant=plant.__name__)


def test_a_byte_that_is_lost_between_two_updates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Splitter.push
    monkeypatch.setattr(Splitter, "push", lambda self, text: original(self, text[:-1]))
    with pytest.raises(AssertionError, match="instead of"):
        for schedule in itertools.islice(storm_schedules(), NUM_SCHEDULES):
            checked_figures(schedule)
