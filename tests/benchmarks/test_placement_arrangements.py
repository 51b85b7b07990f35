"""``splitserve bench placement --cases arrangements`` on a small load."""

from array import array
from collections import Counter

import numpy as np
import pytest

from splitserve.benchmarks.placement import arrangements
from splitserve.benchmarks.placement.arrangements import ARMS, Judged
from splitserve.simulation.twin.cluster import TurnTimes, TwinResult
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload


def test_each_arm_is_compared_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FULL_RATES", {"8192/64": 8.5}), ("LOADS", (0.9,)), ("ITL_MS", (0.0, 15.0)), ("NUM_RUNS", 1)):
        monkeypatch.setattr(arrangements, name, value)
    rows = list(arrangements.arrangements(40))
    assert [row["arm"] for row in rows] == [*ARMS, *ARMS]
    free, bound = rows[: len(ARMS)], rows[len(ARMS) :]
    assert free[0]["worst_of_plain"] == 1.0 and free[2]["worst_of_plain"] < 0.6, "two mixed workers have longer gaps"
    best = max(bound, key=lambda row: row["goodput"])
    assert best["goodput_ratio"] >= 1.0 and best["goodput_ratio"] > bound[0]["goodput_ratio"]
    assert [row["local_share"] for row in bound[:4]] == [0.0, 0.0, 1.0, 1.0] and 0.0 < bound[4]["local_share"] < 1.0


def test_turns_that_a_failed_one_cuts_off_count_as_failed() -> None:
    """Otherwise an arm of which conversations fail would be judged by a lighter load."""
    turns = (Turn((Piece("p", 9),), 2),) * 4
    workload = Workload("two", (Conversation("whole", 0.0, turns), Conversation("cut", 3.5, turns)))
    times = [TurnTimes("whole", at, at, 9, 2, array("d", [at + 0.1, at + 0.2]), ended_at=at + 0.2) for at in range(4)]
    times.append(TurnTimes("cut", 0, 3.5, 9, 2, ended_at=4.0, error="HTTP 503"))
    run = Judged.of(workload, TwinResult(times, 4.0, {}, {}, {}, Counter(local=4)))
    assert (len(run.ttft), run.failed_share) == (8, 0.5)


def test_a_run_of_which_all_requests_fail_has_figures() -> None:
    workload = Workload("one", tuple(Conversation(str(at), at, (Turn((Piece("p", 9),), 2),)) for at in range(4)))
    times = [TurnTimes(str(at), 0, at, 9, 2, ended_at=at + 1.0, error="HTTP 503") for at in range(4)]
    figures = Judged.of(workload, TwinResult(times, 4.0, {}, {}, {}, Counter())).figures(15.0)
    assert figures["failed_share"] == 1.0
    assert {figures[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "goodput")} == {0.0}


def test_a_request_is_good_within_both_objectives() -> None:
    run = Judged(
        ttft=np.array([100.0, 100.0, 501.0, np.inf]),
        mean_gaps=np.array([9.0, 16.0, 9.0, np.inf]),
        gaps=np.array([9.0, 9.0, 16.0]),
        failed_share=0.25,
        seconds=2.0,
        local_share=0.0,
    )
    assert run.figures(15.0)["goodput"] == 0.5 and run.figures(30.0)["goodput"] == 1.0
    assert "goodput" not in run.figures(0.0)
    assert run.figures(0.0)["failed_share"] == 0.25, "the percentiles are those of the others"
