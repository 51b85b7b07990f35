"""``splitserve bench compare``: changes that are there are found, others are not."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from splitserve.benchmarks.goodput.compare import compare, main
from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.result import Conditions, Folder
from splitserve.common.errors import ConfigError

CONDITIONS = Conditions(
    workload="64/8", ttft_ms=100.0, itl_ms=20.0, percentile=90.0, num_requests=100, arms=["2M:least-loaded"], seed=0,
    temperature=0.0, top_p=1.0, kill_seconds=0.0, model="tiny",
)  # fmt: skip


RATES = (2.0, 4.0, 8.0)


def probes(factor: float, seed: int, arm: str = "2M:least-loaded", rates: Sequence[float] = RATES) -> list[ProbeResult]:
    """Return probes whose TTFT grows with the rate, times ``factor``, and varies by 5%."""
    random = np.random.default_rng(seed)
    return [
        ProbeResult(
            arm=arm, rate=rate, seed=seed, offered_rate=rate, seconds=1.0,
            ttft_ms=(factor * 20.0 * rate * np.exp(0.05 * random.standard_normal(100))).tolist(),
            gaps_ms=[[1.0] * 7] * 100, figures={},
        )
        for rate in rates
    ]  # fmt: skip


def kept(path: Path, found: Sequence[ProbeResult]) -> None:
    """Write the folder of a run."""
    folder = Folder(path)
    (path / "probes").mkdir(parents=True)
    folder.begin(CONDITIONS)
    for number, probe in enumerate(found):
        folder.keep(number, probe)


def test_a_change_is_found_with_its_size() -> None:
    [change] = compare(CONDITIONS, probes(1.0, 1), probes(1.25, 2))
    assert change.words == "regression" and change.interval.low < change.ratio < change.interval.high
    # The p90 of TTFT is 1.066 times the median: it crosses 100 ms at 4.92 requests/s, and at 3.82.
    assert change.ratio == pytest.approx(0.776, abs=0.05)
    assert compare(CONDITIONS, probes(1.25, 1), probes(1.0, 2))[0].words == "better"


def test_equal_systems_show_no_clear_change() -> None:
    words = [compare(CONDITIONS, probes(1.0, seed), probes(1.0, seed + 50))[0].words for seed in range(20)]
    assert words.count("no clear change") >= 14


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((2.5, (2.0,)), (3.0, (1.0, 2.0)), "the probes don't tell"),  # less than 2; 1.6
        ((3.0, (1.0, 2.0)), (2.5, (2.0,)), "the probes don't tell"),
        ((0.5, (4.0,)), (0.8, RATES), "the probes don't tell"),  # at least 4; 6.0
        ((0.8, RATES), (0.5, (4.0,)), "the probes don't tell"),
        ((0.5, (4.0,)), (0.5, (2.0,)), "the probes don't tell"),  # at least 4; at least 2
        ((0.5, (8.0,)), (1.25, RATES), "regression"),  # at least 8; 3.9
        ((1.25, RATES), (0.5, (8.0,)), "better"),
        ((1.25, RATES), (2.5, (2.0,)), "regression"),  # 3.9; less than 2
        ((2.5, (2.0,)), (1.25, RATES), "better"),
    ],
)
def test_what_the_probes_only_bound_is_no_change_unless_the_bound_tells(
    before: tuple[float, Sequence[float]], after: tuple[float, Sequence[float]], words: str
) -> None:
    found = [probes(factor, seed, rates=rates) for seed, (factor, rates) in enumerate((before, after))]
    assert compare(CONDITIONS, *found)[0].words == words


def test_the_command_reads_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("a", 1.0), ("b", 1.5)):
        kept(tmp_path / name, probes(factor, 3))
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "regression" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    kept(tmp_path / "below", probes(3.0, 3, rates=(2.0,)))
    kept(tmp_path / "crossed", probes(3.0, 3, rates=(1.0, 2.0)))
    assert main([str(tmp_path / "below"), str(tmp_path / "crossed")]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert "less than 2" in row and "the probes don't tell" in row
    with pytest.raises(ConfigError, match="no folder of"):
        main([str(tmp_path / "a"), str(tmp_path)])
    with pytest.raises(ConfigError, match="no arm in common"):
        compare(CONDITIONS, probes(1.0, 1), probes(1.0, 1, "1P1D:cost"))
