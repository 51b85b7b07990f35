"""``splitserve bench sampling``, short."""

import json
from pathlib import Path

from splitserve.benchmarks.engine.sampling_costs import main


def test_each_feature_has_its_row(tmp_path: Path) -> None:
    options = ["--batch", "2", "--vocab-size", "2500", "--steps", "5", "--result-dir", str(tmp_path)]
    assert main(options) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["results"]
    times = {row["features"]: row["ms"] for row in rows}
    assert list(times) == ["none", "off", "penalties", "penalties, long prompts", "logit_bias", "min_p", "JSON schema"]
    assert all(0 < times["none"] < ms for name, ms in times.items() if name != "none")
