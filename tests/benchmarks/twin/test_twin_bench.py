"""``splitserve bench twin``: cases, cores, bounds; and one run on a real cluster with paced steps that goes on."""

import json
from pathlib import Path

import msgspec
import pytest

from splitserve.benchmarks.twin import bench, run
from splitserve.benchmarks.twin.bench import main
from splitserve.benchmarks.twin.cases import Case, cases_of
from splitserve.benchmarks.twin.comparison import Prediction, bound_of, difference
from splitserve.benchmarks.twin.fit.fits import FIGURES
from splitserve.benchmarks.twin.run import Run, shared_cpus
from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from twin_runs import measured

# Four requests, the fewest of a load, take 240 steps of two sequences: enough for a fit.
SHORT = [
    "--arms", "1M", "1M@256", "--workloads", "64/120", "--loads", "1.1", "--seconds", "2", "--max-num-seqs", "2",
    "--repeats", "1", "--kv-memory", "32MiB", "--jobs", "2",
]  # fmt: skip


def test_cases_are_all_combinations_with_names_for_files() -> None:
    cases = list(cases_of(["paced"], ["2P1D", "2M@512:prefix"], ["512/64"], [1.2, 0.5]))
    assert [case.load for case in cases] == [1.2, 0.5, 1.2, 0.5]
    assert [case.name for case in cases[2:]] == [
        "paced_2M-chunks-512-prefix_512-64_1.2",
        "paced_2M-chunks-512-prefix_512-64_0.5",
    ]


def test_loads_at_once_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "by_core", sorted)
    monkeypatch.setattr(run, "usable_cpus", lambda: {0, 1, 2, 3, 8, 9, 10, 11, 12})
    assert shared_cpus(1) == [[]]
    assert shared_cpus(2) == [[0, 1, 2, 3], [8, 9, 10, 11]]
    with pytest.raises(ConfigError, match="--jobs 10: each load needs cores of its own, and there are 9"):
        shared_cpus(10)


def test_bounds_follow_the_load_and_the_noise_of_repeats() -> None:
    assert (bound_of("TTFT mean", 0.5), bound_of("TTFT mean", 0.8), bound_of("TTFT mean", 0.95)) == (0.05, 0.1, None)
    assert (bound_of("requests/s", 1.2), bound_of("requests/s", 0.5), bound_of("TPOT p99", 0.8)) == (0.03, None, 0.08)
    assert difference([9.0, 11.0]) == pytest.approx(0.2)
    prediction = Prediction("TTFT mean", real=100.0, noise=0.06, twin=108.0, low=95.0, high=110.0, bound=0.05)
    assert prediction.error == pytest.approx(0.08) and prediction.is_inside
    assert prediction.holds, "the repeats differ by 6%: 9% are allowed"
    assert not Prediction("TTFT mean", 100.0, 0.01, 108.0, 101.0, 110.0, 0.05).holds


def test_failed_requests_of_a_measured_load_are_named() -> None:
    """The figures that the twin is compared with are those of the others."""
    whole, cut = (measured(Case(device="paced", arm=arm, workload="64/4", load=0.5), 9.0) for arm in ("1M", "2M"))
    whole.figures.update(requests=20, completed=20, failed={})
    cut.figures.update(requests=20, completed=17, failed={"HTTP 503": 3})
    [note] = bench.failure_notes([whole, cut])
    assert note.startswith(f"{cut.name}: 3 of 20 requests failed")


def test_other_loads_await_the_throughput_of_the_highest_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its repeats begin at once, at a rate that is estimated. Of a repeat, it comes first, since it takes longest."""
    monkeypatch.setattr(Run, "_burst_rate", lambda _run, case: {"1M": 10.0, "2M": 20.0}[case.arm])
    options = [
        "--arms",
        "1M",
        "2M",
        "--workloads",
        "64/8",
        "--loads",
        "0.5",
        "1.2",
        "--continue",
        str(tmp_path / "run"),
    ]
    found = Run.of(bench.parser().parse_args(options))
    assert [(each.case.arm, each.repeat, each.rate) for each in found.orders(set())] == [
        ("1M", 0, 12.0), ("2M", 0, 24.0), ("1M", 1, 12.0), ("2M", 1, 24.0),
    ]  # fmt: skip
    order = next(found.orders({"paced_1M_64-8_1.2_0"}))
    assert (order.case.arm, order.repeat) == ("2M", 0), "a load is begun once"
    Path(next(found.orders(set())).result).write_bytes(msgspec.json.encode(measured(found.cases[0], 11.0)))
    again = Run.of(bench.parser().parse_args(options))
    assert [(each.case.arm, each.case.load, each.repeat, each.rate) for each in again.orders(set())] == [
        ("2M", 1.2, 0, 24.0), ("1M", 0.5, 0, 5.5), ("1M", 1.2, 1, 13.0), ("2M", 1.2, 1, 24.0), ("1M", 0.5, 1, 5.5),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call has time for no load; the second one, in a copy of the folder, measures both, side by side, and
    compares them with their twins."""
    first, folder = tmp_path / "first", tmp_path / "run"
    assert main([*SHORT, "--continue", str(first), "--max-seconds", "5"]) == bench.EXIT_INTERRUPTED
    words = capsys.readouterr().out
    assert "2 loads are left" in words and "go on with --continue" in words
    first.rename(folder)
    arguments = [*SHORT, "--continue", str(folder), "--result-dir", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "paced_1M_64-120_1.1: TPOT mean" in shown and "inside their interval of 90%" in shown
    [file] = tmp_path.glob("twin-*.json")
    kept = json.loads(file.read_text())
    assert [case["case"] for case in kept["cases"]] == ["paced_1M_64-120_1.1", "paced_1M-chunks-256_64-120_1.1"]
    assert all(run["figures"]["failed"] == {} for run in kept["runs"])
    assert str(tmp_path) not in json.dumps({**kept, "command": ""}), "paths of the machine"
    assert [each["figure"] for each in kept["accuracy"]] == list(FIGURES)
    assert sorted(kept["rankings"][0]["real"]) == ["1M", "1M@256"]
    assert {run["cpus"] for run in kept["runs"]} == {len(usable_cpus()) // 2}, "each has cores of its own"
    assert main([*arguments, "--compare-only"]) == 0, "everything is measured and compared"
    with pytest.raises(ConfigError, match="measured under other conditions"):
        main([*arguments, "--seed", "1"])


def test_a_case_is_compared_by_value() -> None:
    one = Case(device="paced", arm="1M", workload="64/8", load=0.5)
    assert one == Case(device="paced", arm="1M", workload="64/8", load=0.5) and len({one, one}) == 1
