"""Timelines of real requests over a prefill and a decode worker: their stages, the client's view, the reports."""

import http.client
import json
import math
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from otlp_receiver import Collector, collector
from serving import PATIENT, wait_for_news
from splitserve.orchestration.cli.trace import chrome_trace, trace_text
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.cluster_report import ClusterReport, RequestTrace, RequestTraces
from splitserve.protocol.config import EngineConfig
from timeline_runs import run
from waiting import wait_until

NUM_REQUESTS = 40
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tiny_qwen3: Path, traces: Collector) -> Iterator[LocalCluster]:
    engine = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", kv_memory_bytes=16 << 20, max_num_batched_tokens=64, threads=1
    )
    router = {"otlp_endpoint": traces.url, "trace_ratio": 0.0, "policy": "least-loaded"}
    spec = simple_spec(engine, num_prefill=1, num_decode=1, port=0, protocol=PATIENT, router=router)
    with LocalCluster(spec, log_level="warning") as running:
        yield running


def read(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
        return body


def stream(cluster: LocalCluster, number: int, **more_headers: str) -> tuple[float, dict[str, Any]]:
    """Stream a request named by ``number``; return the client's own TTFT and the answer's ``splitserve`` object."""
    prompt = [(7 * number + position) % 250 + 1 for position in range(20 + 37 * (number % 9))]
    model = json.loads(read(f"{cluster.url}/v1/models"))["data"][0]["id"]
    body = {
        "model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_route": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "X-Request-Id": f"timeline-{number:05}.", **more_headers}
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc)
    connection.connect()
    began_at, ttft, route = time.monotonic(), math.inf, {}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    with connection.getresponse() as response:
        assert response.headers["X-Request-Id"] == headers["X-Request-Id"]
        for line in response:
            if line.startswith(b"data: {"):
                ttft = min(ttft, time.monotonic() - began_at)
                route = json.loads(line[6:]).get("splitserve", route)
    connection.close()
    return ttft, route


def trace_of(cluster: LocalCluster, number: int) -> RequestTrace:
    found = msgspec.json.decode(read(f"{cluster.url}/admin/requests/timeline-{number:05}."), type=RequestTraces)
    (trace,) = found.traces
    return trace


def is_clock_measured(cluster: LocalCluster) -> bool:
    """Return whether a request's stages use the worker's clock as its link has measured it: after the link is there."""
    _, route = stream(cluster, 90_000)  # the first one connects
    return bool(route["stages"]["dispatch"] != route["stages"]["delivery"])


def test_stages_add_up_to_the_routers_ttft_and_that_to_the_clients(cluster: LocalCluster) -> None:
    wait_until(lambda: is_clock_measured(cluster), "the offset of the clocks stays that of the request itself")
    for number in range(NUM_REQUESTS):
        client_ttft, route = stream(cluster, number)
        trace = trace_of(cluster, number)
        summary = trace.summary
        assert summary.ttft_seconds is not None and summary.actual == "disaggregated"
        assert sum(summary.ttft_stages.values()) == pytest.approx(summary.ttft_seconds, abs=5e-5)
        assert sum(route["stages"].values()) == pytest.approx(summary.ttft_seconds, abs=5e-5)
        assert {
            "prepare",
            "dispatch",
            "grant_wait",
            "prefill_queue",
            "prefill",
            "delivery",
            "write",
        } < summary.ttft_stages.keys()
        for stages in (summary.ttft_stages, summary.handover_stages):
            assert stages and all(seconds >= 0 for seconds in stages.values()), stages
        assert {span.process for span in trace.spans} == {"router", "prefill-0", "decode-0"}
        # The client may have read the first event before the router notes that it is written.
        at_least = summary.ttft_seconds - summary.ttft_stages["write"] - 1e-3
        assert summary.num_output_tokens == MAX_TOKENS and client_ttft >= at_least


def test_a_trace_is_shown_as_text_and_for_perfetto(cluster: LocalCluster) -> None:
    stream(cluster, 70_000)
    trace = trace_of(cluster, 70_000)
    text = trace_text(trace)
    assert "prefill_queue" in text and "verify" in text and "time to first token" in text
    events = chrome_trace([trace])["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"router", "prefill-0", "decode-0"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_trace_has_the_spans_of_all_processes(cluster: LocalCluster, traces: Collector) -> None:
    stream(cluster, 60_000, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    found = traces.wait_for("a" * 32)
    spans = {(span.process, span.name): span for span in found}
    names = {"router": "request", "prefill-0": "prefill_queue", "decode-0": "verify"}
    assert {span.process for span in found} == names.keys() and names.items() <= spans.keys()
    root, attempt = spans["router", "request"], spans["router", "attempt"]
    assert root.parent_id == "b" * 16 and attempt.parent_id == root.span_id
    assert {span.parent_id for span in found if span.process != "router"} == {attempt.span_id}
    assert abs(root.end / 1e9 - time.time()) < 60
    shown = {(span.process, span.name): span.seconds for span in trace_of(cluster, 60_000).spans}
    for (process, name), span in spans.items():
        if name != "chunk":  # there may be several
            assert (span.end - span.begin) / 1e9 == pytest.approx(shown[process, name], abs=2e-6)


def test_metrics_show_stages_steps_and_the_model(cluster: LocalCluster) -> None:
    stream(cluster, 80_000)
    wait_for_news(cluster.url)
    text = read(f"{cluster.url}/metrics").decode()
    assert "_created" not in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('model="' in line for line in samples)
    for stage in ("prefill_queue", "grant_wait", "prefill"):
        assert re.search(rf'splitserve_stage_seconds_count{{[^}}]*stage="{stage}"}} [1-9]', text)
    assert re.search(r'splitserve_handover_stage_seconds_count{[^}]*stage="wire",transport="[^"]+"} [1-9]', text)
    assert re.search(r'splitserve_worker_step_tokens_count{[^}]*worker="decode-0"} [1-9]', text)
    report = msgspec.json.decode(read(f"{cluster.url}/admin/workers"), type=ClusterReport)
    assert report.rates is not None and report.rates.requests_per_second > 0


def test_clocks_that_differ_change_nothing(tiny_qwen3: Path) -> None:
    """The prefill worker's clock is 50 ms ahead, the decode worker's 50 ms behind: effects follow their causes."""
    outcome = run("shifted", tiny_qwen3, 24)
    assert outcome.problems == [] and outcome.figures["disaggregated"] == 24
