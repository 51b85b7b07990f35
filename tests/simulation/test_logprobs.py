"""Log-probabilities under seeded faults: each delivered token has exactly one, the right one, whatever happens.

The simulator's clients check it at each update (``SimClient._check_scores``).
"""

import pytest

from schedules import Schedule, run_schedule
from splitserve.engine.prompt_scores import PromptScores
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.step import Draw
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.state import RequestState
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator

SHAPES = {"1P1D": Shape(), "2P2D": Shape(prefill=2, decode=2), "2M": Shape(prefill=0, decode=0, mixed=2)}
FAULTS = {
    "quiet": Faults(scored=True),
    "lossy": Faults(scored=True, drop=0.2, duplicate=0.2, max_delay=0.3),
    "deaths": Faults(scored=True, kills=3, freezes=1, step_seconds=0.1),
    "drains": Faults(scored=True, drains=3, step_seconds=0.1),
    "reads": Faults(scored=True, read_error=0.2, read_stuck=0.1, post_error=0.1),
    "aborts": Faults(scored=True, abort=0.5, max_delay=0.1, step_error=0.05),
    "rounding": Faults(scored=True, kills=3, read_error=0.2, rounding=True, step_seconds=0.1),
}
NUM_SEEDS = 2


def scored(sim: Simulator) -> int:
    """Return how many requests got all their tokens, and the log-probabilities of prompt or output."""
    clients = sim.router.clients.values()
    return sum(
        client.is_done and bool(client.output) and bool(client.scores or client.prompt_scores) for client in clients
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_each_token_has_its_log_probability(faults: Faults, shape: Shape) -> None:
    assert sum(scored(run_schedule(Schedule(seed=seed, faults=faults, shape=shape))) for seed in range(NUM_SEEDS)) > 0


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_each_choice_has_those_of_its_output_and_of_the_prompt(faults: Faults) -> None:
    sims = [
        run_schedule(Schedule(seed=seed, faults=faults, shape=shape, max_choices=4))
        for seed, shape in enumerate(SHAPES.values())
    ]
    siblings = [client for sim in sims for client in sim.router.clients.values() if client.first is not None]
    assert any(client.prompt_scores for client in siblings) and any(client.scores for client in siblings)


def test_preemption_and_tiers_lose_none() -> None:
    shapes = (Shape(num_blocks=16), Shape(num_blocks=16, tier_slots=40))
    sims = [
        run_schedule(Schedule(seed=seed, faults=Faults(scored=True), shape=each))
        for seed in range(2)
        for each in shapes
    ]
    assert sum(scored(sim) for sim in sims) > 0


def test_a_prefix_that_is_reused_too_far_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptScores, "max_reused_tokens", None)
    with pytest.raises(AssertionError):
        for seed in range(20):
            run_schedule(Schedule(seed=seed, faults=FAULTS["quiet"], shape=SHAPES["2M"]))


def test_tokens_without_their_log_probabilities_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode forgets those of the first token, which came with the hand-over."""
    monkeypatch.setattr(SinkHandover, "first_draw", property(lambda self: Draw((self.first_tokens[0],))))
    with pytest.raises(AssertionError):
        for seed in range(20):
            run_schedule(Schedule(seed=seed, faults=FAULTS["quiet"], shape=SHAPES["1P1D"]))


def test_choices_that_lose_theirs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router doesn't know that the other choices of a prompt want any."""
    original = ActiveRequest.add_sibling

    def add_sibling(self: ActiveRequest, request_id: str, choice: int) -> ActiveRequest:
        sibling = original(self, request_id, choice)
        sibling.state = RequestState(request_id, sibling.sampling.max_tokens)
        return sibling

    monkeypatch.setattr(ActiveRequest, "add_sibling", add_sibling)
    with pytest.raises(AssertionError, match="before the prompt's log-probabilities"):
        for seed in range(20):
            run_schedule(Schedule(seed=seed, faults=FAULTS["quiet"], shape=SHAPES["1P1D"], max_choices=4))
