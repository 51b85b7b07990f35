"""The plots of the documentation show the newest kept results, and what they show is in those."""

import re

import pytest

from splitserve.benchmarks.common.charts import style, svg
from splitserve.benchmarks.common.report import RESULTS_DIRECTORY
from splitserve.benchmarks.tables import placement, plots
from splitserve.benchmarks.tables.runs import read_runs

pytestmark = pytest.mark.skipif(not plots.IMAGES.is_dir(), reason="not a checkout")
PAGE = RESULTS_DIRECTORY.parents[1] / "docs" / "benchmarks" / "developers.md"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_an_image_shows_the_newest_kept_run(name: str) -> None:
    find, _ = plots.PLOTS[name]
    found = find(read_runs())
    assert found is not None, "nothing is kept that it could show"
    assert plots.source_of(plots.IMAGES / name) == found[0].path.name, (
        "run python -m splitserve.benchmarks.tables.plots"
    )
    assert f"(../images/{name})" in PAGE.read_text()


@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_same_rows_give_the_same_image_and_other_rows_another(name: str) -> None:
    pytest.importorskip("matplotlib")
    find, draw = plots.PLOTS[name]
    found = find(read_runs())
    assert found is not None
    run, rows = found
    with style():
        first, again = (svg(draw(rows), name, run.path.name) for _ in range(2))
        doubled = [
            {key: 2 * value if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
        other = svg(draw(doubled), name, run.path.name)
    assert first == again != other
    assert not re.search(r' (width|height)="\d+(\.\d+)?pt"', first), "it fits into any page"


def test_rows_of_routes_come_with_their_best_rate() -> None:
    rows = [
        {"workload": "short", "arm": "always", "scale": 0.7, "goodput": 3.0},
        {"workload": "short", "arm": "always", "scale": 1.0, "goodput": 5.0},
        {"workload": "short", "arm": "cost", "scale": 0.7, "goodput": 4.0},
        {"workload": "long", "arm": "cost", "scale": 0.7, "goodput": 9.0},
        {"workload": "short", "arm": "cost of the best threshold", "goodput_ratio": 0.8, "holds": False},
    ]
    assert placement.goodputs(rows, "short") == {"always": 5.0, "cost": 4.0}
