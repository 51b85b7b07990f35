"""Tables of kept results of ``splitserve bench kernels``. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Section, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

OURS, OTHER = "triton", "flashinfer"
OPERATION, DECODE = "make_attention", "decode, "


def decode_attentions(runs: Sequence[Run]) -> Section:
    """Return the section on attention of steps that decode, beside FlashInfer's."""
    text = (
        "`splitserve bench kernels --operation make_attention`: µs of a layer's attention in a step that decodes, in a "
        "CUDA graph, with KV that the cache doesn't hold. The share is that of the copy's rate, at which a query "
        "token's KV could be read."
    )
    headers = ["run", "shape", "sequences", "contexts", "ours", "FlashInfer's", "times ours", "share", "commit"]
    rows = [
        [run_link(run), shape, *_cells(own, other), commit(run)]
        for run in of_bench(runs, "kernels")
        for shape, figures in run.content["figures"].items()
        for own, other in _pairs(figures)
    ]
    return Section("Attention of decodes", text, headers, rows)


def _pairs(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield our figure and the other's, of each case that has both."""
    found = {
        (each["rows"], each["case"], each["backend"]): each
        for each in figures
        if each["operation"] == OPERATION and each["case"].startswith(DECODE)
    }
    for (rows, case, backend), each in found.items():
        other = found.get((rows, case, OTHER))
        if backend == OURS and other is not None:
            yield each, other


def _cells(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    contexts = own["case"].removeprefix(DECODE).removeprefix("context ").replace(", context ", ", others ")
    return [
        str(own["rows"]), contexts, number(own["us"]), number(other["us"]), number(other["us"] / own["us"]),
        percent(own["floor_share"]),
    ]  # fmt: skip
