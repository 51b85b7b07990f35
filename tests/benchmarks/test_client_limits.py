"""The load generator against a server that does no work: every event is received, from one process and from two."""

import pytest

from splitserve.benchmarks.serving.client_limits import Measured, Point, measure


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_event_of_every_request_is_received(num_processes: int) -> None:
    measured = measure(Point(rate=20.0, num_tokens=5, interval_ms=2.0), seconds=1.0, num_processes=num_processes)
    assert measured.failed == 0 and measured.num_events == 20 * 5
    assert measured.asked == 20.0 and measured.offered > 0 and measured.events_per_second > 0


def test_a_client_that_is_late_by_more_than_a_percent_does_not_keep_up() -> None:
    def of(offered: float, failed: int = 0) -> bool:
        return Measured(100.0, offered, 1, 1.0, 1.0, 0.0, 0.0, failed).keeps_up

    assert [of(100.0), of(99.1), of(98.9), of(101.1), of(100.0, failed=1)] == [True, True, False, False, False]
