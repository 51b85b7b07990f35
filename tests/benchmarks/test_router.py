"""``splitserve bench router``: what single stages of a long prompt take; long answers come whole."""

import json
from array import array
from pathlib import Path

import pytest

from splitserve.benchmarks.router.overhead import main
from splitserve.benchmarks.router.stages import prompt_stages


def test_stages_of_a_prompt_are_timed_where_all_of_it_hits() -> None:
    stages = prompt_stages(array("i", range(300)))
    assert {name.partition(":")[0] for name in stages} == {"router", "worker", "message out", "message in"}
    assert all(milliseconds > 0 for milliseconds in stages.values())


def test_long_answers_come_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """400 tokens of 50 requests at once are 20,000 messages, and an answer is longer than 64 KiB."""
    options = ["--output-tokens", "400", "--rate", "4", "--seconds", "1", "--result-dir", str(tmp_path)]
    assert main(options) == 0
    assert capsys.readouterr().out.split()[:4] == ["arm", "req/s", "requests", "failed"]
    [path] = tmp_path.iterdir()
    rows = json.loads(path.read_text())["results"]
    assert "count" in rows[1]["last_ms"] and {*rows[1]["added_ms"]} == {"mean", "p50", "p90", "p99", "max"}
    assert [(row["arm"], row["failed"], row["requests"]) for row in rows] == [
        ("direct", 0, 4), ("whole", 0, 4), ("stream", 0, 4),
    ]  # fmt: skip
