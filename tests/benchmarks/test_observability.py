"""The bench of what observing requests costs the router: each arm serves, and their costs are compared."""

import json
from pathlib import Path

from otlp_receiver import collector
from splitserve.benchmarks.router import observability


def test_the_arms_are_compared_and_the_result_is_kept(tmp_path: Path) -> None:
    with collector() as received:
        arguments = ["--rounds", "2", "--otlp-endpoint", received.url, "--result-dir", str(tmp_path)]
        assert observability.main(arguments) == 0
    (kept,) = tmp_path.glob("*.json")
    result = json.loads(kept.read_text())
    rows = result["results"]
    arms = {observability.WITH, observability.WITHOUT, observability.TRACED, observability.ALL_TRACED}
    assert set(rows) == arms and result["traces"]["us_per_sampled_request"] > 0
    assert rows[observability.WITHOUT]["added_us_per_request"] == 0.0
    assert all(min(row["us_per_request_of_many"], row["us_per_request_of_few"]) > 0 for row in rows.values())
