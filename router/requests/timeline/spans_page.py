"""docs/reference/spans.md, made from the declarations of stages and spans.

``scripts/reference_pages.py`` writes it.
"""

from collections.abc import Iterable, Iterator, Mapping

from splitserve.router.requests.timeline.spans import DECODE_SPANS, PREFILL_SPANS, ROUTER_SPANS
from splitserve.router.requests.timeline.stages import HANDOVER_STAGES, TTFT_STAGES
from splitserve.router.tracing.attributes import ATTRIBUTES, RESOURCE_ATTRIBUTES, SPAN_ATTRIBUTES

_HEAD = """<!-- made by `python scripts/reference_pages.py`, not by hand -->

# Spans and stages

[A request's timeline](../guides/operations.md#a-requests-timeline) as its views show it. A stage or a span ends where
its event was marked, and begins at the event before.
"""

_STAGES = """## Stages

Stages are adjacent and add up: those of the time to first token to that time, those of the hand-over to the time from
the last token that prefill drew (the second one, if it drew that, too) to decode's own first one. They are the label
`stage` of `splitserve_stage_seconds` and `splitserve_handover_stage_seconds`, fields of `return_route`, and the last
lines of `splitserve trace`.
"""

_SPANS = """## Spans

`splitserve trace`, its file for Perfetto, and OpenTelemetry show them. Spans of workers lie below the attempt that they
belong to, all others below `request`, which has the event `first_token`.
"""


def spans_page() -> str:
    """Return the page's Markdown."""
    workers = [("prefill", span) for span in PREFILL_SPANS.values()]
    workers += [("decode", span) for span in DECODE_SPANS.values()]
    return "\n".join(
        [
            _HEAD,
            _STAGES,
            *_table(("stage of the time to first token", "meaning"), TTFT_STAGES.items()),
            *_table(("stage of the hand-over", "meaning"), HANDOVER_STAGES.items()),
            _SPANS,
            *_table(("span", "process", "meaning"), ((name, "router", text) for name, text in ROUTER_SPANS.items())),
            *_table(("span", "process", "meaning"), ((name, process, text) for process, (name, text) in workers)),
            "## Attributes of OpenTelemetry\n",
            *_attributes("resource", RESOURCE_ATTRIBUTES),
            *_attributes("`request`", ATTRIBUTES),
            *_attributes("the other spans", SPAN_ATTRIBUTES),
        ]
    )


def _attributes(where: str, attributes: Mapping[str, str]) -> Iterator[str]:
    return _table((f"attribute of {where}", "meaning"), attributes.items())


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a table's lines; the first column is code."""
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for name, *rest in rows:
        yield f"| `{name}` | {' | '.join(rest)} |"
    yield ""
