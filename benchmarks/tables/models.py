"""Tables of the measured models' steps on one GPU, with default options, at the newest commits that have them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Rows, extent, number, of_bench, percent
from splitserve.benchmarks.tables.runs import Run, cited
from splitserve.benchmarks.tables.sections import GREEDY

BATCHES = (1, 8, 64, 256)
PROMPTS = (1024, 8192)
CONTEXT = 1024
HEADERS = ("model", *(f"decode {each}" for each in BATCHES), *(f"prefill {each}" for each in PROMPTS), "runs")
CONDITIONS = (
    "Random weights in the models' shapes, default options, idle, CUDA graphs, without HTTP; of each model the "
    "newest commit that measured both phases; what it left out is that of the newest one before. Decode: a greedy "
    f"step of so many sequences with contexts of {CONTEXT:,} tokens each: the fastest and the slowest round in "
    "milliseconds, and the floor as a share of the median round. The floor is the time in which a large copy on the "
    "same GPU moves as many bytes as weights and "
    "KV have that the step must read. Of a mixture of experts it counts those that a few other steps of the same "
    "run chose; a share above 100% says that the measured steps chose fewer. Prefill: likewise, and the floating-"
    "point operations per second as a share of those of a large matrix product."
)
WAYS_HEADERS = ("model", "batch", "greedy", "top-p", "logprobs", "penalties", "JSON schema", "runs")
WAYS_CONDITIONS = (
    "Conditions as above. A greedy step, and how much longer a step takes that draws in another way, as a share "
    "of the greedy one of the same round (median). Top-p: temperature 0.8, top-p 0.95, top-k 50. Logprobs: of the "
    "five most probable tokens. JSON schema: every sequence follows the same one."
)
_WAYS = ("top-p", "logprobs", "penalties", "json")


def step_rows(runs: Sequence[Run]) -> Rows:
    """Return a row of :data:`HEADERS` for each model."""
    rows = []
    for shape, measured in _by_shape(runs):
        cells = {run: (_decode(run, shape, GREEDY), _prefill(run, shape)) for run in measured}
        both = [run for run, (decode, prefill) in cells.items() if decode and prefill]
        decode, prefill, found = dict[int, Any](), dict[int, Any](), list[Run]()
        while both:  # what a commit left out is that of the one before
            newest = _of_newest(both)
            both = [run for run in both if run not in newest]
            more = {each: cell for run in newest for each, cell in cells[run][0].items() if each not in decode}
            others = {each: cell for run in newest for each, cell in cells[run][1].items() if each not in prefill}
            if (more.keys() & set(BATCHES)) or (others.keys() & set(PROMPTS)):
                decode, prefill, found = decode | more, prefill | others, [*newest, *found]
        if not found:
            continue
        texts = [_timed(decode.get(batch), "floor_share") for batch in BATCHES]
        texts += [_timed(prefill.get(tokens), "gemm_share") for tokens in PROMPTS]
        rows.append([shape, *texts, cited(found)])
    return rows


def way_rows(runs: Sequence[Run]) -> Rows:
    """Return a row of :data:`WAYS_HEADERS` for each model and batch that was also measured with other draws."""
    rows = []
    for shape, measured in _by_shape(runs):
        cells = {run: {way: _decode(run, shape, way) for way in (GREEDY, *_WAYS)} for run in measured}
        for batch in BATCHES:
            if found := _of_newest(run for run, ways in cells.items() if all(batch in ways[way] for way in ways)):
                ways = {way: figures[batch] for way, figures in cells[found[-1]].items()}
                more = [percent(ways[way]["beyond_greedy"]) for way in _WAYS]
                rows.append([shape, str(batch), f"{number(ways[GREEDY]['step_ms'])} ms", *more, cited(found[-1:])])
    return rows


def _by_shape(runs: Sequence[Run]) -> Iterable[tuple[str, list[Run]]]:
    """Yield each model with its runs that have no unusual option."""
    usual = [run for run in of_bench(runs, "engine") if run.unusual == "none" and not run.option("--attention-backend")]
    for shape in sorted({shape for run in usual for shape in run.content["models"]}):
        yield shape, [run for run in usual if shape in run.content["models"]]


def _decode(run: Run, shape: str, way: str) -> dict[int, dict[str, Any]]:
    """Return the figures of a way to draw, by batch."""
    drawn = [each for each in _in_rounds(run, shape, "decode") if each["sampling"] == way]
    return {each["batch"]: each for each in drawn if each["context"] == CONTEXT}


def _prefill(run: Run, shape: str) -> dict[int, dict[str, Any]]:
    return {each["tokens"]: each for each in _in_rounds(run, shape, "prefill")}


def _in_rounds(run: Run, shape: str, phase: str) -> Iterable[dict[str, Any]]:
    """Yield the figures of a phase that say the fastest and the slowest round, which those of the first runs don't."""
    return (each for each in run.content["models"][shape][phase] if "least_ms" in each)


def _of_newest(runs: Iterable[Run]) -> list[Run]:
    """Return those of the commit of the newest run, oldest first."""
    having = sorted(runs, key=lambda run: run.label)
    return [run for run in having if run.commit == having[-1].commit]


def _timed(figure: dict[str, Any] | None, share: str) -> str:
    if figure is None:
        return "-"
    return f"{extent([figure['least_ms'], figure['most_ms']])} ms, {percent(figure[share])}"
