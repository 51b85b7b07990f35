"""Result files of benches, as the tables read them."""

from pathlib import Path
from typing import Any

from splitserve.benchmarks.tables.runs import Run


def result_run(bench: str = "isolation", label: str = "1123T000000", *command: str, **content: Any) -> Run:
    """Return the run of a bench with the options ``command``, of which ``content`` replaces or adds fields."""
    base = {
        "command": ["splitserve", "bench", bench, *command],
        "time": "2026-11-23T00:00:00+00:00",
        "versions": {"commit": "abc1234", "torch": "2.11.0"},
        "machine": {"gpus": ["NVIDIA H200, 580.1", "NVIDIA H200, 580.1"]},
    }
    return Run(Path(f"{bench}-2026{label}-1.json"), bench, label, {**base, **content})
