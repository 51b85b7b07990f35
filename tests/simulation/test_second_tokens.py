"""Second tokens in the simulator: most of its workers draw them, so every other test of schedules has them, too."""

import pytest

from schedules import Schedule, run_schedule
from splitserve.prefill.first_tokens import FirstTokens
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.simulation.faults import Faults, Shape

SHAPES = [Shape(), Shape(num_blocks=16), Shape(prefill=2, decode=2), Shape(window=5), Shape(prefill_blocks=12)]
FAULTS = Faults(drop=0.1, duplicate=0.1, read_late=0.3, abort=0.2, kills=1)


def test_the_schedules_do_draw_second_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, arrived = [], []
    goes_on, first_draw = FirstTokens.goes_on, SinkHandover.first_draw.fget
    assert first_draw is not None
    monkeypatch.setattr(FirstTokens, "goes_on", lambda *given: chosen.append(goes_on(*given)) or chosen[-1])
    monkeypatch.setattr(
        SinkHandover, "first_draw", property(lambda sink: arrived.append(sink.second_token) or first_draw(sink))
    )
    for seed, shape in enumerate(SHAPES * 3):
        run_schedule(Schedule(seed=seed, faults=FAULTS, shape=shape))
    assert sum(chosen) >= 15 and chosen.count(False) >= 5
    assert sum(token is not None for token in arrived) >= 4, "the others ended with it, were aborted or withdrawn"
