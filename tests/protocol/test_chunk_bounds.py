"""Prompt tokens beside sequences that decode: what an objective for gaps leaves time for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.protocol.placement.chunk_bounds import LEAST_SHARE, OBJECTIVE_SHARE, ChunkBounds
from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs

MODEL = StepModel(4e-3, 1.5e-5, 3.1e-8, 2.4e-5, 1.3e-9, 1000, saved_beside=3e-6)
BOUNDS = ChunkBounds(fixed=320, most=4096)


def step_seconds(num_decodes: int, context: int, start: int, tokens: int) -> float:
    return MODEL.seconds(StepWork(num_decodes, context, tokens, pairs(start, tokens)))


@given(
    st.integers(1, 256),
    st.integers(0, 4096),
    st.integers(0, 130_000),
    st.floats(1e-4, 1.0),
    st.integers(1, 8192),
)
def test_a_step_fills_its_share_of_the_objective(
    running: int, length: int, start: int, objective: float, most: int
) -> None:
    alone = MODEL.decode_seconds(running, running * length)
    tokens = ChunkBounds(320, most).tokens(MODEL, alone, start, objective)
    bound = max(OBJECTIVE_SHARE * objective, (1 + LEAST_SHARE) * alone)
    assert 1 <= tokens <= most
    if tokens > 1:
        assert step_seconds(running, running * length, start, tokens) <= bound + 1e-12
    unit = 1 if tokens < 320 else 128  # longer steps are of few sizes, so that each has a CUDA graph
    assert tokens < 320 or (tokens - 320) % 128 == 0
    if tokens + unit <= most:
        assert step_seconds(running, running * length, start, tokens + unit) > bound - 1e-12


def test_more_sequences_a_deeper_prompt_or_a_stricter_objective_leave_less() -> None:
    usual = BOUNDS.tokens(MODEL, 5e-3, 0, 13e-3)
    assert usual == pytest.approx((OBJECTIVE_SHARE * 13e-3 - 5e-3) / MODEL.per_token_beside, rel=0.05)
    assert BOUNDS.tokens(MODEL, 9e-3, 0, 13e-3) < usual
    assert BOUNDS.tokens(MODEL, 5e-3, 30_000, 13e-3) < usual
    assert BOUNDS.tokens(MODEL, 5e-3, 0, 11e-3) < usual < BOUNDS.tokens(MODEL, 5e-3, 0, 30e-3)


def test_prompts_get_a_share_of_the_step_where_outputs_use_the_objective_up() -> None:
    tokens = BOUNDS.tokens(MODEL, 15e-3, 0, 10e-3)
    assert tokens == BOUNDS.tokens(MODEL, 15e-3, 0, 15e-3)
    assert tokens * MODEL.per_token_beside == pytest.approx(LEAST_SHARE * 15e-3, rel=0.02)


def test_without_an_objective_or_a_model_the_number_is_fixed() -> None:
    assert BOUNDS.tokens(MODEL, 5e-3, 0, 0.0) == BOUNDS.tokens(StepModel(), 5e-3, 0, 15e-3) == BOUNDS.fixed
