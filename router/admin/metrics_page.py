"""docs/reference/metrics.md, made from the declarations of all metrics.

``scripts/reference_pages.py`` writes it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from splitserve.router.admin.histogram import QuickHistogram
from splitserve.router.admin.metrics import RouterMetrics, WorkerCollector

_HEAD = """<!-- made by `python scripts/reference_pages.py`, not by hand -->

# Metrics

The router's `GET /metrics` has all metrics of a cluster in Prometheus' text format; those of workers and tiers are
as of the worker's last heartbeat, their counters since the worker's start. A histogram
has `_bucket`, `_sum` and `_count`. Each series also has the label `model`, the served model's name.
"""


def metrics_page() -> str:
    """Return the page's Markdown."""
    own = [
        metric for metric in vars(RouterMetrics()).values() if isinstance(metric, MetricWrapperBase | QuickHistogram)
    ]
    workers = list(WorkerCollector(list).collect())
    tiers = [family for family in workers if family.name.startswith("splitserve_tier_")]
    others = [family for family in workers if family not in tiers]
    requests = [(next(iter(metric.collect())), metric) for metric in own]
    return "\n".join(
        [
            _HEAD,
            *_table("Requests", requests),
            *_table("Workers", ((family, family) for family in others)),
            *_table("Tiers of KV below the device", ((family, family) for family in tiers)),
        ]
    )


def _table(title: str, metrics: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yield a table's lines; ``metrics`` are pairs of a family and the object that knows its labels."""
    yield f"## {title}\n"
    yield "| metric | kind | labels | meaning |\n|---|---|---|---|"
    for family, labelled in metrics:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in labelled._labelnames)
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"
    yield ""
