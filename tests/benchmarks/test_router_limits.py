"""The bench of the router's limits: its verdicts on numbers worked out by hand, and a short run."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.benchmarks.router.goals import verdicts
from splitserve.benchmarks.router.limits import main


def test_verdicts_by_hand() -> None:
    latency = {"kind": "ids", "cpu_ms": 2.0, "added_p99_ms": 6.0, "added_p50_ms": 1.0}
    results: dict[str, list[dict[str, Any]]] = {
        "latency": [latency | {"rate": 100.0, "cpu_ms": 9.0}, latency | {"rate": 200.0}],
        "streams": [{"events_per_second": 14_900, "events": 99, "expected": 100}],
        "long": [
            {"kind": "none", "requests": 0, "cpu_ms_of_all": 100.0, "late_p99_ms": 1.0},
            {"kind": "later turn", "requests": 10, "cpu_ms_of_all": 500.0, "late_p99_ms": 11.0},
        ],
        "workers": [
            {"policy": "cost", "workers": 2, "request_ms": 2.0},
            {"policy": "cost", "workers": 64, "request_ms": 2.1},
        ],
        "memory": [{"memory_mib": mib} for mib in (50.0, 100.0, 100.0, 120.0)],
    }
    found = {verdict["goal"]: (verdict["value"], verdict["met"]) for verdict in verdicts(results)}
    assert found == {
        "CPU ms of a request, ids": (2.0, True),
        "added p99 ms at 200 req/s, ids": (6.0, False),
        "events/s of 256 streams": (14_900, True),
        "events that came, none merged": (99, False),
        "CPU ms of 100k tokens, later turn": (40.0, False),
        "others' tokens late p99 ms, later turn": (11.0, False),
        "CPU with 64 workers over 2, cost": (1.05, True),
        "memory at the end over that at half": (1.2, False),
    }


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--parts", "latency", "--rate", "20", "--seconds", "1", "--prompt-tokens", "200"]
    assert main([*arguments, "--result-dir", str(tmp_path)]) == 0, capsys.readouterr().out
    [path] = tmp_path.glob("router-limits-*.json")
    result = json.loads(path.read_text())
    rows = result["results"]["latency"]
    assert [row["kind"] for row in rows] == ["ids", "new", "seen"]
    assert all(row["requests"] == 20 and not row["failed"] and row["cpu_ms"] > 0 for row in rows)
