"""``splitserve bench goodput`` on real clusters: the folder of a run, its report, and a run that goes on."""

import contextlib
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from splitserve.benchmarks.goodput import bench
from splitserve.benchmarks.goodput.bench import main
from splitserve.benchmarks.goodput.clusters import Clusters
from splitserve.common.errors import ConfigError

OPTIONS = ["--suite", "smoke", "--num-requests", "8", "--first-rate", "30", "--kv-memory", "64MiB", "--side-by-side",
           "--twin"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two probes of each arm, on one cluster of each, which both calls use."""
    parent = tmp_path_factory.mktemp("results")
    with Clusters(side_by_side=True) as clusters, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "Clusters", lambda **_options: contextlib.nullcontext(clusters))
        status = main([*OPTIONS, "--max-seconds", "0.001", "--max-probes", "1", "--result-dir", str(parent)])
        [made] = parent.iterdir()
        assert status == 130 and len(list((made / "probes").iterdir())) == 1  # its time was up after one probe
        assert main([*OPTIONS, "--max-probes", "2", "--continue", str(made)]) == 0
    return made


def test_each_arm_was_measured_twice(folder: Path) -> None:
    probes = [json.loads(file.read_text()) for file in sorted((folder / "probes").iterdir())]
    assert [probe["arm"] for probe in probes[:2]] == ["2M:least-loaded", "1P1D:least-loaded"]
    assert Counter(probe["arm"] for probe in probes) == {"2M:least-loaded": 2, "1P1D:least-loaded": 2}
    for probe in probes:
        assert len(probe["ttft_ms"]) == 8 and None not in probe["ttft_ms"]
        assert all(len(gaps) == 7 for gaps in probe["gaps_ms"])
        assert probe["figures"]["completed"] == 8 and len(probe["slowest"]) == 8
    stages = probes[1]["stages"]
    assert "grant_wait" in stages and sum(stage["mean"] for stage in stages.values()) > 0
    assert all(sum(probe["routes"].values()) == 8 for probe in probes), "those of other probes are not among them"
    assert len(probes[1]["step_models"]) == 2


def test_twins_propose_first_rates_and_stand_beside_each_probe(folder: Path) -> None:
    """Workers fitted their steps under the short load; the second call had the twins of the first one."""
    assert {file.stem for file in (folder / "twins").iterdir()} == {"2M-least-loaded", "1P1D-least-loaded"}
    probes = [json.loads(file.read_text()) for file in sorted((folder / "probes").iterdir())]
    firsts = {probe["arm"]: probe for probe in reversed(probes)}
    for probe in probes:
        simulated = probe["simulated"]
        assert simulated["goodput"] == firsts[probe["arm"]]["rate"]
        assert 0 < simulated["itl_ms"] < math.inf and 0 < simulated["ttft_ms"] < math.inf
    assert "simulated ttft ms" in (folder / "report.html").read_text()


def test_the_report_is_one_file(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "1P1D:least-loaded" in page and page.count("<svg") == 3 and "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page) and "@import" not in page and "url(http" not in page
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".html", ".csv", ".json", ".png"}
    [kept] = [path for path in folder.glob("goodput-*.json") if "verdict" in path.read_text()][-1:]
    assert json.loads(kept.read_text())["versions"]["commit"]


def test_other_conditions_need_another_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"other conditions \(itl_ms\)"):
        main([*OPTIONS, "--itl-ms", "7", "--continue", str(folder)])
    with pytest.raises(ConfigError, match=r"other conditions \(settings\)"):
        main([*OPTIONS, "--second-token-at-prefill", "--continue", str(folder)])


def test_a_dry_run_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--suite", "gpu", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1P1D:cost: 1P1D, conditional" in shown and "p99 of TTFT at most 500 ms and of ITL at most 15 ms" in shown


def test_a_dry_run_of_a_sweep_counts_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them once, though it may be named twice; none is left out, as in a search."""
    rates = ["--rates", "3", "1", "2", "1.0"]
    assert main(["--suite", "smoke", *rates, "--num-repeats", "2", "--min-seconds", "5", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "\n12 probes, about 9 minutes\n" in shown and "20 requests a probe, for 5 s at least" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "2M", "1P2D"], "same number of devices"),
        (["--arms", "1P1D:best"], "policy must be one of"),
        (["--workloads", "trace:/no/such/file"], "cannot read the trace"),
        (["--endpoint", "http://127.0.0.1:1"], "must be NAME=URL"),
        (["--devices", "1"], "at least 2 devices"),
        (["--percentile", "100"], "percentile between 0 and 100"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main([*arguments, "--dry-run"])
