"""The reference of log lines and spans: no call of a logger, no mark and no attribute is missing."""

import re

from documents import load_script
from splitserve.protocol.cluster_report import RequestSummary, TraceSpan
from splitserve.protocol.messages.marks import MarkKind
from splitserve.router.requests.timeline.spans import DECODE_SPANS, PREFILL_SPANS
from splitserve.router.tracing.attributes import ATTRIBUTES, SPAN_ATTRIBUTES, attributes_of, attributes_of_span

page = load_script("log_page")
WRITES = re.compile(r"\b(?:\w*log|\w*logger|logging)\.(?:debug|info|warning|error|exception|critical|log)\(")


def test_every_call_of_a_logger_is_in_the_page() -> None:
    for folders in page.PROCESSES.values():
        for folder in folders:
            found = {(line.module, line.number) for line in page.lines_of(folder)}
            for path in (page.ROOT / folder).rglob("*.py"):
                module = path.relative_to(page.ROOT).as_posix().removeprefix("src/splitserve/").removesuffix(".py")
                if module == "common/logs":
                    continue  # it passes on what others write
                for number, text in enumerate(path.read_text().splitlines(), 1):
                    assert not WRITES.search(text) or (module, number) in found, f"{module}:{number} is in no page"


def test_every_folder_with_a_logger_is_walked() -> None:
    walked = {folder for folders in page.PROCESSES.values() for folder in folders}
    roots = [page.ROOT / "src" / "splitserve"]
    roots += [
        page.ROOT / name
        for name in ("router", "prefill", "decode", "kvconnector", "kernels", "models", "orchestration")
    ]
    for root in roots:
        for path in root.rglob("*.py"):
            if "getLogger(__name__)" in path.read_text() and not path.is_relative_to(
                page.ROOT / "src/splitserve/simulation"
            ):
                place = path.relative_to(page.ROOT).as_posix()
                assert any(place.startswith(f"{folder}/") for folder in walked), place


def test_every_field_of_a_request_has_a_meaning() -> None:
    assert len(page.fields()) == len(RequestSummary.__struct_fields__)
    assert all(meaning for _, meaning in page.fields())


def test_every_mark_ends_a_span_and_every_attribute_is_declared() -> None:
    assert PREFILL_SPANS.keys() | DECODE_SPANS.keys() == set(MarkKind)
    values = {"transport": "tcp", "finish_reason": "stop"}
    summary = RequestSummary(**{name: values.get(name, 1) for name in RequestSummary.__struct_fields__})
    assert attributes_of(summary, "m").keys() == ATTRIBUTES.keys()
    assert (
        attributes_of_span(TraceSpan("attempt", "router", 0.0, 1.0, 2, "worker_lost")).keys() == SPAN_ATTRIBUTES.keys()
    )
