"""The effect of keeping cores awake, as the bench reports it."""

import json
import os
from pathlib import Path

import pytest

from splitserve.benchmarks.engine.awake_cores import ARMS, Turns, figures, held_up, main
from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.worker.machine.awake_cores import current_cpu_quota


def test_who_is_held_up() -> None:
    """Woken late, or computing for long: once where both."""
    turns = Turns([0.0001, 0.002, 0.0, 0.003, 0.0009], [0.0003, 0.0003, 0.0014, 0.002, 0.0003])
    assert held_up(turns) == 3
    found = figures([turns, Turns([0.0001] * 5, [0.01] * 5)])
    assert found["held_up_share"] == pytest.approx(0.3) and found["turns"] == 10
    assert found["late_p50_us"] == pytest.approx(100.0) and found["late_max_us"] == pytest.approx(3000.0)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or current_cpu_quota() is not None, reason="needs Linux, no quota")
def test_both_arms_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0.2", "--repeats", "2", "--save", "--result-dir", str(tmp_path)]) == 0
    assert "hardware threads" in capsys.readouterr().out
    [saved] = tmp_path.iterdir()
    results = json.loads(saved.read_text())["results"]
    assert list(results) == list(ARMS) and all(each["turns"] > 20 for each in results.values())


def test_cores_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="this process may use"):
        main(["--cpus", str(max(usable_cpus()) + 1)])
    with pytest.raises(ConfigError, match="'a'; write it like"):
        main(["--cpus", "a"])
