"""``splitserve bench soak``: its arithmetic on numbers worked out by hand, and a short run of real processes."""

import json
from pathlib import Path

import pytest

from splitserve.benchmarks.serving import soak
from splitserve.common.errors import ConfigError


def test_growth_is_that_of_the_second_half() -> None:
    samples = soak.Samples()
    for index in range(21):  # 2 s and 100 requests apart; the last 11 are of the second half, 20 s
        samples.seconds.append(2.0 * index)
        samples.num_sent.append(100 * index)
    samples.resident_mib["flat"] = [100.0 + min(50.0 * index, 500.0) for index in range(21)]
    samples.resident_mib["growing"] = [200.0 + 3.0 * index for index in range(21)]
    growth = samples.growth(2000)
    assert growth["flat"] == {
        "first_mib": 100.0, "half_mib": 600.0, "last_mib": 600.0, "max_mib": 600.0,
        "second_half_mib": pytest.approx(0.0), "mib_per_1000_requests": pytest.approx(0.0),
    }  # fmt: skip
    assert growth["growing"]["second_half_mib"] == pytest.approx(30.0)
    assert growth["growing"]["mib_per_1000_requests"] == pytest.approx(30.0)
    with pytest.raises(ConfigError, match="the second half has 1 samples, at least 8 are needed"):
        samples.growth(4000)


def test_a_short_soak_measures_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "80", "--concurrency", "16", "--sample-seconds", "0.02", "--max-growth-mib", "1000"]
    assert soak.main([*arguments, "--max-output-len", "8", "--result-dir", str(tmp_path)]) == 0
    assert "80 requests, 16 at once" in capsys.readouterr().out
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert set(result["growth"]) == {"router", "prefill-0", "decode-0"} == set(result["samples"]["resident_mib"])
    assert result["num_failed"] == 0 and result["output_tokens"] > 80
    assert min(figures["first_mib"] for figures in result["growth"].values()) > 10
