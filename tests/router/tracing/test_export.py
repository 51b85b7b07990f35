"""Export of traces to a real receiver of OTLP over HTTP, and no cost where tracing is off."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from live_router import LiveRouter
from otlp_receiver import Collector, collector
from router_harness import ready, served_router
from splitserve.common.errors import ConfigError
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.request import Role
from splitserve.router.requests.timeline import spans
from splitserve.router.tracing import exporter
from splitserve.router.tracing.context import TraceContext
from splitserve.router.tracing.exporter import traces_url
from splitserve.router.tracing.tracing import NoTracing, Tracing, tracing_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def received() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def router(received: Collector, model_dir: Any) -> Iterator[Any]:
    with served_router(model_dir, otlp_endpoint=received.url, trace_ratio=0.0) as (process, workers):
        workers.start("m0", Role.MIXED)
        ready(process)
        yield process


def complete(router: Any, sampled: str, trace: str = TRACE, **body: Any) -> Any:
    headers = {"traceparent": f"00-{trace}-{SPAN}-{sampled}", "tracestate": "vendor=abc", "X-Request-Id": "traced"}
    content = {"model": "tiny", "prompt": "a b c", "max_tokens": 3, **body}
    status, answer_headers, _ = router.request("POST", "/v1/completions", content, **headers)
    assert status == 200
    return answer_headers


def test_a_sampled_request_is_a_trace_below_the_clients_span(router: Any, received: Collector) -> None:
    headers = complete(router, "01")
    _, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (trace_id, flags, headers["tracestate"]) == (TRACE, "01", "vendor=abc")
    found = received.wait_for(TRACE)
    assert received.paths == {"/v1/traces"}
    (root,) = [span for span in found if span.name == "request"]
    assert (root.span_id, root.parent_id, root.trace_state) == (span_id, SPAN, "vendor=abc")
    assert root.service == "splitserve-router" and root.attributes["splitserve.request_id"].startswith("traced-")
    assert root.attributes["gen_ai.usage.output_tokens"] == 3 and root.events == ("first_token",)
    ids = {span.span_id for span in found}
    assert all(span.parent_id in ids for span in found if span is not root)
    assert all(root.begin <= span.begin <= span.end <= root.end + 1000 for span in found)


def test_every_choice_has_spans_below_the_first(router: Any, received: Collector) -> None:
    trace = TRACE[::-1]
    headers = complete(router, "01", trace, n=2, prompt=["a", "b"])
    roots = [span for span in received.wait_for(trace, num_roots=4) if span.name == "request"]
    first = headers["traceparent"].split("-")[2]
    assert sum(span.span_id == first for span in roots) == 1 and len({span.span_id for span in roots}) == 4
    assert {span.trace_id for span in roots} == {trace}


def test_a_request_that_is_not_sampled_is_not_exported(router: Any, received: Collector) -> None:
    other = "1" * 32
    assert complete(router, "00", other)["traceparent"].endswith("-00")
    complete(router, "01", "2" * 32)
    received.wait_for("2" * 32)
    assert not received.trace(other)


# ---- cost of tracing that is off ----


def num_spans_made(monkeypatch: pytest.MonkeyPatch, tracing: NoTracing | None, *, sampled: bool) -> int:
    """Return how many spans of any kind a request causes in a router with this tracing; None: as by default."""
    made: list[str] = []
    for module, name in ((spans, "TraceSpan"), (exporter, "ReadableSpan")):
        kind = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, _make=kind, **more: made.append("") or _make(*args, **more))

    async def serve() -> None:
        router = LiveRouter()
        try:
            if tracing is not None:
                router.dispatcher.reports.tracing = tracing
            await router.start("m0")
            request = await router.submit()
            if tracing is not None:
                request.context = type(request.context)(trace=TraceContext(1, 2, is_sampled=sampled))
            await router.finish(request)
        finally:
            router.close()

    asyncio.run(serve())
    return len(made)


def test_no_span_is_made_where_tracing_is_off_or_the_request_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch, received: Collector
) -> None:
    assert num_spans_made(monkeypatch, None, sampled=False) == 0
    tracing = Tracing(exporter.OtlpExporter(received.url, "m"), 0.01)
    assert num_spans_made(monkeypatch, tracing, sampled=False) == 0
    assert num_spans_made(monkeypatch, tracing, sampled=True) > 0
    tracing.close()


def test_a_router_without_tracing_imports_no_opentelemetry() -> None:
    program = (
        "import sys, json; import splitserve.router.server; "
        "print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_collector_that_is_gone_delays_the_end_by_a_bounded_time() -> None:
    tracing = exporter.OtlpExporter("http://127.0.0.1:9", "m")
    tracing.close()


def test_a_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "splitserve.router.tracing.exporter", None)
    config = RouterConfig(model="m", served_model_name="m", otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"splitserve\[otel\]"):
        tracing_of(config)
    assert type(tracing_of(RouterConfig(model="m", served_model_name="m"))) is NoTracing


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:4318/otlp/v1/traces", "http://c:4318/otlp/v1/traces"),
    ],
)
def test_traces_go_to_the_collectors_path(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
