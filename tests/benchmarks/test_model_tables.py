"""The tables of models' steps are those of the newest commits that measured a model with default options."""

from typing import Any

from tests.support.result_files import result_run

from splitserve.benchmarks.tables.models import HEADERS, WAYS_HEADERS, step_rows, way_rows
from splitserve.benchmarks.tables.runs import Run


def decoded(batch: int, step_ms: float, way: str = "greedy", beyond: float = 0.0) -> dict[str, Any]:
    return {
        "batch": batch, "context": 1024, "step_ms": step_ms, "least_ms": step_ms - 0.5, "most_ms": step_ms + 0.5,
        "floor_share": 1.5 / step_ms, "sampling": way, "beyond_greedy": beyond,
    }  # fmt: skip


def prefilled(tokens: int, ms: float) -> dict[str, Any]:
    return {"tokens": tokens, "ms": ms, "least_ms": ms, "most_ms": ms, "gemm_share": 0.5}


def engine_run(label: str, *options: str, commit: str = "new", **phases: list[dict[str, Any]]) -> Run:
    models = {"gemma-3-27b": {"decode": [], "prefill": [], **phases}}
    return result_run("engine", label, *options, models=models, versions={"commit": commit, "torch": "2.11.0"})


def test_a_model_s_row_is_of_the_newest_commit_that_has_both_phases_and_of_those_before() -> None:
    both = {"decode": [decoded(1, 2.0), decoded(64, 3.0)], "prefill": [prefilled(8192, 100.0)]}
    runs = [
        engine_run("1124T000000", commit="old", decode=[decoded(1, 1.0), decoded(256, 9.0)], prefill=both["prefill"]),
        engine_run("1125T000000", **both),
        engine_run("1125T000001", "--attention-backend", "triton", decode=[decoded(1, 7.0)], prefill=both["prefill"]),
        engine_run("1125T000002", "--enforce-eager", decode=[decoded(1, 8.0)], prefill=both["prefill"]),
        engine_run("1126T000000", commit="later", decode=[decoded(1, 6.0)]),
    ]
    (row,) = step_rows(runs)
    assert dict(zip(HEADERS, row, strict=True)) == {
        "model": "gemma-3-27b",
        "decode 1": "1.50 to 2.50 ms, 75.0%",
        "decode 8": "-",
        "decode 64": "2.50 to 3.50 ms, 50.0%",
        "decode 256": "8.50 to 9.50 ms, 16.7%",
        "prefill 1024": "-",
        "prefill 8192": "100 ms, 50.0%",
        "runs": "`old`: 1124T000000; `new`: 1125T000000",
    }


def test_other_ways_to_draw_stand_beside_the_greedy_step_of_their_run() -> None:
    ways = [decoded(1, 2.0), *(decoded(1, 2.0, way, 0.01) for way in ("top-p", "logprobs", "penalties")),
            decoded(1, 2.0, "json", -0.005)]  # fmt: skip
    (row,) = way_rows([engine_run("1125T000000", decode=ways), engine_run("1126T000000", decode=[decoded(1, 1.0)])])
    assert dict(zip(WAYS_HEADERS, row, strict=True)) == {
        "model": "gemma-3-27b", "batch": "1", "greedy": "2.00 ms", "top-p": "1.0%", "logprobs": "1.0%",
        "penalties": "1.0%", "JSON schema": "-0.5%", "runs": "`new`: 1125T000000",
    }  # fmt: skip


def test_models_without_such_runs_have_no_rows() -> None:
    runs = [engine_run("1125T000000", decode=[decoded(1, 2.0)])]
    assert (step_rows(runs), way_rows(runs)) == ([], [])
