"""``splitserve bench twin``: cases, cores, bounds; and one run on a real cluster with paced steps that goes on."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.twin import bench
from splitserve.benchmarks.twin.bench import main, shared_cpus
from splitserve.benchmarks.twin.cases import Case, cases_of
from splitserve.benchmarks.twin.comparison import Prediction, bound_of, difference
from splitserve.common.errors import ConfigError

# Four requests, the fewest of a load, take 240 steps of two sequences: enough for a fit.
SHORT = [
    "--arms", "1M", "--workloads", "64/120", "--loads", "0.3", "1.1", "--seconds", "5", "--max-num-seqs", "2",
    "--repeats", "1", "--kv-memory", "32MiB",
]  # fmt: skip


def test_cases_are_all_combinations_with_names_for_files() -> None:
    cases = list(cases_of(["paced"], ["2P1D", "2M@512:prefix"], ["512/64"], [1.2, 0.5]))
    assert [case.load for case in cases] == [1.2, 0.5, 1.2, 0.5]
    assert [case.name for case in cases[2:]] == [
        "paced_2M-chunks-512-prefix_512-64_1.2",
        "paced_2M-chunks-512-prefix_512-64_0.5",
    ]


def test_loads_at_once_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "usable_cpus", lambda: {0, 1, 2, 3, 8, 9, 10, 11, 12})
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


def test_a_run_goes_on_where_it_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call has time for no load; the second one measures both, and compares them with their twins."""
    folder = tmp_path / "run"
    arguments = [*SHORT, "--continue", str(folder), "--result-dir", str(tmp_path)]
    assert main([*arguments, "--max-seconds", "5"]) == bench.EXIT_INTERRUPTED
    words = capsys.readouterr().out
    assert "2 loads are left" in words and "go on with --continue" in words
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "paced_1M_64-120_0.3: TPOT mean" in shown and "inside their interval of 90%" in shown
    [file] = tmp_path.glob("twin-*.json")
    kept = json.loads(file.read_text())
    assert [case["case"] for case in kept["cases"]] == ["paced_1M_64-120_1.1", "paced_1M_64-120_0.3"]
    assert all(run["figures"]["failed"] == {} for run in kept["runs"])
    assert str(tmp_path) not in json.dumps({**kept, "command": ""}), "paths of the machine"
    assert main(arguments) == 0, "everything is measured: compared anew"
    with pytest.raises(ConfigError, match="measured under other conditions"):
        main([*arguments, "--seed", "1"])


def test_a_case_is_compared_by_value() -> None:
    one = Case(device="paced", arm="1M", workload="64/8", load=0.5)
    assert one == Case(device="paced", arm="1M", workload="64/8", load=0.5) and len({one, one}) == 1
