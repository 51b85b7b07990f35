"""The Grafana dashboard, and Prometheus' alerts: their structure, and their series against a real router's /metrics."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from documents import ROOT
from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.benchmarks.router.worker_script import Reply, Request, Script, default_script
from splitserve.protocol.counters import Distribution, TierLoad, WorkerLoad
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.membership import Heartbeat, PeerLink
from splitserve.protocol.messages.requests import DecodeRequest, FailureCode, RequestFailed, StepTokens
from splitserve.protocol.request import Role
from waiting import wait_until

GRAFANA = ROOT / "deploy" / "grafana" / "splitserve.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
FAILING_TOKENS = 7  # a request for so many fails

pytestmark = pytest.mark.skipif(not GRAFANA.is_file(), reason="not a checkout")

TEXT, WHOLE = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
SOURCE = {"type": "object", "required": ["type", "uid"], "properties": {"uid": {"const": "${datasource}"}}}
POSITION = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {"h": {**WHOLE, "minimum": 1}, "w": {**WHOLE, "minimum": 1, "maximum": 24}, "x": WHOLE, "y": WHOLE},
}
TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource"],
    "properties": {"datasource": SOURCE, "expr": TEXT},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {"id": WHOLE, "type": {"enum": ["row", "timeseries", "stat"]}, "title": TEXT, "gridPos": POSITION},
    "if": {"properties": {"type": {"const": "row"}}},
    "else": {
        "required": ["targets", "datasource", "fieldConfig", "description"],
        "properties": {"datasource": SOURCE, "targets": {"type": "array", "minItems": 1, "items": TARGET}},
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40},
        "title": TEXT,
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "minItems": 10, "items": PANEL},
        "templating": {"type": "object", "required": ["list"]},
        "time": {"type": "object", "required": ["from", "to"]},
    },
}
"""What Grafana's import needs of a dashboard, in its classic model."""

_SELECTOR = re.compile(r"\b(splitserve_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
_SAMPLE = re.compile(r"^(splitserve_\w+)(?:\{(.*)\})? ")


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The labels of each series of a router that has seen requests, failures, tiers and links."""
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    router = RouterProcess(path, ttft_objective_ms=1e5, tpot_objective_ms=1e5)
    workers = Workers(router.membership)
    steps = Distribution([1, 2], 5)
    try:
        for role in (Role.PREFILL, Role.DECODE):
            worker = workers.start(f"{role}-0", role, failing(default_script()))
            worker.load = WorkerLoad(
                peers_ready=1, step_sequences=steps, step_tokens=steps, tiers=[TierLoad(name="host", hits=1)]
            )
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        for count in (4, FAILING_TOKENS):
            router.post("/v1/completions", prompt="Hello, how are you?", max_tokens=count)
        found: dict[str, set[str]] = {}

        def has_all() -> bool:
            """Look at the metrics between two heartbeats of which only one has a link."""
            worker.say(Heartbeat(worker.load, [PeerLink("prefill-0", "tcp", 1e9, "it is slow")]))
            found.update(labels_of(str(router.request("GET", "/metrics")[2])))
            return {"splitserve_link_slow", "splitserve_tier_hits_total"} <= found.keys()

        wait_until(has_all)
        yield found
    finally:
        workers.close()
        router.stop()


def failing(script: Script) -> Script:
    def reply(body: Request) -> list[Reply]:
        if body.sampling.max_tokens == FAILING_TOKENS:
            return [Reply(RequestFailed(body.key, FailureCode.INTERNAL, "as the test wants"))]
        seconds = 0.2 if isinstance(body, DecodeRequest) else 0.0  # after prefill's token
        return [marked(each, seconds) for each in script(body)]

    return reply


def marked(reply: Reply, seconds: float) -> Reply:
    """Return a reply whose first tokens bring the marks of their way."""
    if not isinstance(reply.body, StepTokens):
        return reply
    marks = [Mark(kind, time.monotonic()) for kind in MarkKind]
    deltas = [msgspec.structs.replace(delta, marks=[] if delta.position else marks) for delta in reply.body.deltas]
    return Reply(StepTokens(deltas), seconds)


def labels_of(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is not None:
            found.setdefault(sample[1], set()).update(re.findall(r'(\w+)="', sample[2] or ""))
    return found


def missing(expression: str, series: dict[str, set[str]]) -> list[str]:
    """Return series and labels of a PromQL expression that the router doesn't have."""
    wanted = _SELECTOR.findall(expression)
    assert wanted, f"no series in {expression}"
    lacking = [name for name, _ in wanted if name not in series]
    known = set().union(*(series.get(name, set()) for name, _ in wanted))
    for name, selectors in wanted:
        lacking += [f"{name}: {label}" for label in _LABEL.findall(selectors) if label not in series.get(name, set())]
    for labels in _BY.findall(expression):
        lacking += [label for label in re.findall(r"\w+", labels) if label not in known]
    return lacking


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GRAFANA.read_text())
    return found


def test_the_dashboard_has_the_structure_that_grafana_imports() -> None:
    found = dashboard()
    jsonschema.validate(found, DASHBOARD)
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, f"{panel['title']} covers another panel"
        cells |= own
    names = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(found))) - {"__rate_interval"}
    assert used == names == {"datasource", "model"}


def test_no_series_of_the_dashboard_is_missing(series: dict[str, set[str]]) -> None:
    lacking = {
        f"{panel['title']}: {each}"
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
        for each in missing(target["expr"], series)
    }
    assert not lacking, lacking
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= set().union(*(series[name] for name, _ in _SELECTOR.findall(target["expr"]))), panel[
                "title"
            ]


def test_no_series_of_the_alerts_is_missing(series: dict[str, set[str]]) -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["metrics_path"] == "/metrics" and scrape["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    for name in config["rule_files"]:
        (group,) = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
        for rule in group["rules"]:
            assert not missing(rule["expr"], series), rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


def test_a_series_that_does_not_exist_is_found(series: dict[str, set[str]]) -> None:
    assert missing('rate(splitserve_nonsense_total{model="m"}[5m])', series)
    assert missing('splitserve_worker_ready{planet="mars"}', series)
    assert missing("sum by (planet) (splitserve_worker_ready)", series)
    assert not missing("sum by (role) (splitserve_worker_ready)", series)


def test_the_observability_guide_names_series_that_exist(series: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "guides" / "observability.md").read_text()
    named = set(re.findall(r"`(splitserve_\w+)`", text))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series} | set(series)
    assert len(named) > 12 and named <= families, named - families


def test_the_file_is_in_the_docs() -> None:
    assert "deploy/grafana/splitserve.json" in (ROOT / "docs" / "guides" / "observability.md").read_text()
    assert Path(GRAFANA).stat().st_size < 200_000
