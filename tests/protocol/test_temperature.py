"""Temperatures that are greedy."""

import pytest

from splitserve.protocol.request import LEAST_TEMPERATURE, SamplingParams


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        (0.0, 0.0),
        (1e-308, 0.0),
        (5e-324, 0.0),
        (LEAST_TEMPERATURE / 2, 0.0),
        (LEAST_TEMPERATURE, LEAST_TEMPERATURE),
        (0.8, 0.8),
    ],
)
def test_logits_are_divided_by_no_temperature_that_makes_them_infinite(given: float, drawn: float) -> None:
    assert SamplingParams(1, temperature=given).draw_temperature == drawn
