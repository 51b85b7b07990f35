"""The number of KV blocks that the doctor's probe expects, against the engine's own rule."""

import pytest

from splitserve.engine.cache_groups import TableRule
from splitserve.orchestration.doctor.probe import Shape


@pytest.mark.parametrize("window", [1, 8, 15, 16, 17, 64, 519, 520, 521, 4096])
@pytest.mark.parametrize("num_tokens", [24, 72, 520])
def test_blocks_of_windows_are_those_of_the_engine(num_tokens: int, window: int) -> None:
    full = num_tokens // 16 + 1
    assert Shape(num_tokens, 16, 320).num_blocks == full
    needed = full - TableRule(16, window).first_needed(num_tokens)
    assert Shape(num_tokens, 16, 320, (window, window)).num_blocks == full + 2 * needed
