"""Tables of the README and of docs/benchmarks: figures of the newest commit that has such runs, and those of all kept
runs, with conditions and the runs' names. Pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from splitserve.benchmarks.tables.cells import ARRANGEMENTS, extent, number, of_bench, percent
from splitserve.benchmarks.tables.runs import Run, cited
from splitserve.benchmarks.tables.sections import GREEDY, SHAPE, isolation_load, readings

Found = Sequence[tuple[Run, dict[str, Any]]]
LOADED = (
    ("TTFT p50", "ttft_ms", "p50"), ("TTFT p99", "ttft_ms", "p99"), ("second token p50", "second_token_ms", "p50"),
    ("second token p99", "second_token_ms", "p99"), ("third token p50", "third_token_ms", "p50"),
    ("third token p99", "third_token_ms", "p99"), ("ITL p50", "itl_ms", "p50"), ("ITL p99", "itl_ms", "p99"),
    ("longest gap", "itl_ms", "max"),
)  # fmt: skip
BOTH = "with cores kept awake and without"
SHOWN_GPU = "H200"
"""The kind of GPU whose figures the README and the documentation show; those of others are beside the result files."""
HEADERS = ("what", "newest commit", "all kept runs", "conditions", "runs, by commit")


def shown(runs: Sequence[Run]) -> list[Run]:
    """Return the runs on :data:`SHOWN_GPU` or without GPUs, and those whose tables name the GPUs themselves."""
    return [run for run in runs if run.bench == "goodput" or run.gpu in (SHOWN_GPU, "none")]


def loaded_rows(runs: Sequence[Run], *, with_runs: bool = True) -> list[list[str]]:
    """Return 1P1D against mixed workers, a column per arrangement; the lowest worst figure is bold.

    ``with_runs``: the last row of each load names the runs.
    """
    loads: dict[str, dict[str, list[tuple[Run, dict[str, Any]]]]] = {}
    for run in of_bench(runs, "isolation"):
        for result in run.content["results"]:
            found = loads.setdefault(isolation_load(run), {name: [] for name in arrangements_of(runs)})
            found[result["arrangement"]].append((run, result["all"]))
    rows = []
    for load, arrangements in loads.items():
        for title, name, which in LOADED:
            columns = [
                [figures[name][which] for _, figures in found if figures.get(name)] for found in arrangements.values()
            ]
            if not any(columns):  # a figure that runs have only of late
                continue
            least = min(max(values) for values in columns if values)
            cells = [_cell(values, least) for values in columns]
            rows.append([load, title, *cells])
        if with_runs:
            rows.append([load, "runs", *(cited(run for run, _ in found) for found in arrangements.values())])
    return rows


def arrangements_of(runs: Sequence[Run]) -> list[str]:
    """Return the arrangements that any of the runs measured, in the order of the columns."""
    measured = {result["arrangement"] for run in of_bench(runs, "isolation") for result in run.content["results"]}
    return [name for name in ARRANGEMENTS if name in measured]


def newest_loaded(runs: Sequence[Run]) -> list[Run]:
    """Return the runs under load that the README shows: of each load the sampled ones of the newest commit that has
    1P1D beside mixed workers."""
    sampled = [
        run
        for run in of_bench(runs, "isolation")
        if run.is_sampled and {"1P1D", "2 mixed"} <= {*arrangements_of([run])}
    ]
    newest_commits = {isolation_load(run): run.commit for run in sampled}
    return [run for run in sampled if run.commit == newest_commits[isolation_load(run)]]


def _cell(values: Sequence[float], least: float) -> str:
    if not values:
        return "-"
    return f"**{extent(values)}**" if max(values) == least else extent(values)


def figure(what: str, conditions: str, found: Found, describe: Callable[[Found], Iterable[str]]) -> list[str]:
    """Return a row of :data:`HEADERS`; ``describe`` puts the figures of some of the runs into words."""
    newest = max((run for run, _ in found), key=lambda run: run.label, default=None)
    latest = [(run, each) for run, each in found if newest is not None and run.commit == newest.commit]
    return [what, *("; ".join(describe(some)) for some in (latest, found)), conditions, cited(run for run, _ in found)]


def values(found: Found, name: str, text: Callable[[float], str] = number, *, high: bool = False) -> str:
    return extent([each[name] for _, each in found], text, high=high)


def step_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    every = [
        (run, phase, each)
        for run in of_bench(runs, "engine")
        if run.has_graphs
        for phase in ("decode", "prefill")
        for each in run.content["models"].get(SHAPE, {}).get(phase, [])
        if each.get("sampling", GREEDY) == GREEDY and (phase == "decode" or not run.option("--prefix"))
    ]
    for batch in (1, 64, 256):
        found = [(run, each) for run, phase, each in every
                 if phase == "decode" and (each["batch"], each["context"]) == (batch, 1024)]  # fmt: skip
        yield figure(f"decode step, {batch} x 1024 tokens", "1 GPU, idle, without HTTP", found, _decode_texts)
    for tokens in (512, 1024, 8192):
        found = [(run, each) for run, phase, each in every if phase == "prefill" and each["tokens"] == tokens]
        yield figure(f"prefill of {tokens} tokens", "1 GPU, idle, without HTTP", found, _prefill_texts)


def _decode_texts(found: Found) -> Iterable[str]:
    yield f"{values(found, 'step_ms')} ms"
    yield f"the copy floor is {values(found, 'floor_share', percent, high=True)} of it"
    if reads := [(run, each) for run, each in found if "read_floor_share" in each]:
        yield f"the read floor {values(reads, 'read_floor_share', percent, high=True)}"
    if parts := [(run, each) for run, each in found if each.get("parts_ms")]:
        yield f"its products alone and its KV at the copy's rate {values(parts, 'parts_share', percent, high=True)}"


def _prefill_texts(found: Found) -> Iterable[str]:
    yield f"{values(found, 'ms')} ms"
    yield f"{values(found, 'gemm_share', percent, high=True)} of the GEMM rate"
    if turns := [(run, each) for run, each in found if each.get("beside_share")]:
        yield f"{values(turns, 'beside_share', percent, high=True)} of that of products beside it"


def serving_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    cases: dict[tuple[str, ...], list[tuple[Run, dict[str, Any]]]] = {}
    names = ("--request-rate", "--max-concurrency", "--input-len", "--output-len")
    for run in of_bench(runs, "serve"):
        cases.setdefault(tuple(run.option(name) for name in names), []).append((run, run.content["figures"]))
    for (rate, at_once, num_input, num_output), found in cases.items():
        load = f"{at_once} at once" if rate == "inf" else f"{rate} per second"
        what = f"requests of {num_input} in, {num_output} out, {load}"
        describe = partial(_serving_texts, has_latency=rate != "inf")
        yield figure(what, "1 mixed worker, 1 GPU, loaded" if rate != "1" else "1 mixed worker, 1 GPU", found, describe)


def _serving_texts(found: Found, *, has_latency: bool) -> Iterable[str]:
    if has_latency:
        for name, title, which in (("ttft_ms", "TTFT", ("p50", "p99")), ("itl_ms", "ITL", ("p50", "p99", "max"))):
            parts = [extent([each[name][p] for _, each in found]) for p in which]
            yield f"{title} {' / '.join(which)} {' / '.join(parts)} ms"
    if reports := [report for _, each in found for report in each.get("profile", {}).values()]:
        busy = extent([report["device_busy_share"] for report in reports], percent, high=True)
        yield f"device busy {busy} of {extent([report['seconds'] for report in reports])} s"


def handover_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    for cores in (True, False):
        found = [(run, each) for run, each in readings(runs) if run.keeps_cores_awake == cores
                 and (each["prompt_tokens"], each["prefill_tp"], each["decode_tp"]) == (4096, 1, 1)]  # fmt: skip
        conditions = f"2 GPUs, one reader, idle{', cores kept awake' if cores else ''}"
        yield figure("KV of 4096 tokens (537 MB) read", conditions, found, _read_texts)
    served = [(run, each) for run in of_bench(runs, "handover") if run.is_served for each in run.content["results"]
              if (run.shape, each["prompt_tokens"], each["mode"]) == (SHAPE, 4096, "one chunk")]  # fmt: skip
    conditions = f"1P1D, 2 GPUs, idle; {BOTH}, with Ray and without"
    for token, is_second in (("first token", False), ("second token, drawn at prefill,", True)):
        found = [(run, each) for run, each in served if run.draws_second_tokens == is_second]
        if found or not is_second:
            yield figure(f"{token} to decode ready, 4096 tokens in one chunk", conditions, found, _ready_texts)


def _ready_texts(found: Found) -> Iterable[str]:
    yield from (f"{p} {values(found, f'handover_{p}_ms')} ms" for p in ("p50", "p99"))


def _read_texts(found: Found) -> Iterable[str]:
    yield f"{values(found, 'handover_ms')} ms"
    yield f"{values(found, 'share_of_copy', percent, high=True)} of a plain copy's rate"


def latency_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    for tokens in (1024, 4096, 8192):
        found = [(run, each) for run in of_bench(runs, "latency") for each in run.content["results"]
                 if each["prompt_tokens"] == tokens and not run.draws_second_tokens]  # fmt: skip
        conditions = f"2 GPUs against 1, idle; {BOTH}; last chunk 512 or 1024"
        yield figure(f"1P1D against a mixed worker, {tokens} tokens", conditions, found, _latency_texts)


def _latency_texts(found: Found) -> Iterable[str]:
    yield f"TTFT ratio {values(found, 'ttft_ratio')}"
    yield f"second token {values(found, '1P1D_second_ms')} ms"
    yield f"of a mixed worker {values(found, 'mixed_second_ms')} ms"


def tier_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    tiers = of_bench(runs, "tiers")
    host = "1 GPU, host tier (off by default)"
    for tokens in (4096, 32768):
        found = [(run, hit) for run in tiers for hit in run.content.get("hits", []) if hit["tokens"] == tokens]
        yield figure(f"{tokens} tokens found in host memory", f"{host}, idle; {BOTH}", found, _hit_texts)
    paces = [(run, run.content["pace"]) for run in tiers if "pace" in run.content]
    yield figure("16 streams beside such prompts of 4096", f"{host}; {BOTH}", paces, _pace_texts)
    for part, title in (("no_reuse", "share nothing"), ("fits", "stay on the device")):
        found = [(run, run.content[part]) for run in tiers if part in run.content]
        what, conditions = f"throughput of prompts that {title}", f"{host}, 16 at once, cores kept awake"
        yield figure(what, conditions, found, _throughput_texts)


def _hit_texts(found: Found) -> Iterable[str]:
    yield f"TTFT {values(found, 'with_ttft_ms')} ms"
    yield f"computed {values(found, 'without_ttft_ms')} ms"


def _pace_texts(found: Found) -> Iterable[str]:
    yield f"mean ITL {extent([each['loads_over_quiet'] for _, each in found])} times that without"
    resident = extent([each["resident_itl_ms"] / each["quiet_itl_ms"] for _, each in found])
    yield f"beside prompts found on the device {resident} times"


def _throughput_texts(found: Found) -> Iterable[str]:
    ratio = values(found, "throughput_ratio", lambda value: f"{value:.4f}", high=True)
    yield f"{ratio} times that without the tier"


TWO_RANKS_CASE = "decode 64 x 1024"


def rank_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    found = [
        (run, {"one": one["milliseconds"][TWO_RANKS_CASE], "two": two["milliseconds"][TWO_RANKS_CASE]})
        for run in of_bench(runs, "tensor-parallel") if run.content["model"] == SHAPE
        for one, two in [run.content["results"]]
        if TWO_RANKS_CASE in one["milliseconds"]
    ]  # fmt: skip
    yield figure("two ranks, decode step of 64 x 1024 tokens", "2 GPUs, idle, without HTTP", found, _rank_texts)


def _rank_texts(found: Found) -> Iterable[str]:
    yield f"{values(found, 'two')} ms"
    speedup = extent([each["one"] / each["two"] for _, each in found], high=True)
    yield f"{speedup} times as fast as one rank"


def start_rows(runs: Sequence[Run]) -> Iterable[list[str]]:
    """Yield the row of a mixed worker's starts on a GPU, if there are any but the first of a run, which builds
    kernels."""
    alone = {"prefill": 0, "decode": 0, "mixed": 1}
    found = [
        (run, start)
        for run in of_bench(runs, "up")
        if run.gpu != "none" and run.option("--device") != "cpu" and run.option("--dtype") in ("", "auto", "bfloat16")
        and run.content["options"]["shape"] == SHAPE and run.content["options"].items() >= alone.items()
        for result in run.content["results"] if result["place"] == "local"
        for start in result["runs"][1:]
    ]  # fmt: skip
    if not found:
        return
    yield figure("from `splitserve up` on", "1 mixed worker, 1 GPU, kernels built before", found, _start_texts)


def _start_texts(found: Found) -> Iterable[str]:
    yield from (f"{name} {values(found, name)} s" for name in ("ready", "first token"))
    phases = [(run, each) for run, start in found for each in start["phases"].values()]
    names = [name for name in (phases[0][1] if phases else {}) if all(name in each for _, each in phases)]
    if listed := ", ".join(f"{name} {values(phases, name)}" for name in names):
        yield f"phases of the worker: {listed} s"


def user_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the figures of the benches for users, except those under load."""
    return [*handover_rows(runs), *serving_rows(runs)]


def developer_rows(runs: Sequence[Run]) -> list[list[str]]:
    makers = (latency_rows, step_rows, rank_rows, tier_rows, start_rows)
    return [row for make in makers for row in make(runs)]


def readme_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a few figures without load, without their runs."""
    return [row[:-1] for make in (latency_rows, handover_rows) for row in make(runs)]


def conditions(runs: Sequence[Run]) -> str:
    """Describe the conditions common to all runs, from their files; tables of goodput name their own."""
    runs = [run for run in runs if run.gpus != "none" and run.bench != "goodput"]
    torch = " and ".join(sorted({run.torch for run in runs}))
    gpus = " and ".join(sorted({run.gpus.partition(" x ")[2] for run in runs}))
    unmarked = sum(not run.commit for run in runs)
    return (
        f"All on {gpus}, torch {torch}, bfloat16, random weights in Llama-3.1-8B's shape, greedy unless said; "
        "options that are off by default are named. Best to worst of the runs; a single number is a single run. "
        f"{unmarked} of {len(runs)} result files name no commit, and are marked so."
    )


RUN_NAMES = "Runs are called by month, day and time, as in the names of their files in `benchmarks/results/`."


def loaded_conditions(runs: Sequence[Run]) -> str:
    """Return the conditions of the runs under load that docs/benchmarks shows."""
    return (
        "Under load, in milliseconds: requests arrive at random for 12 s, prefix caching is off. The greedy 1P1D ran "
        f"{BOTH} and with a last chunk of 512 or 1024; everything else by default. In the sampled runs (top-p 0.95, "
        f"{_rounds(runs)} by turns) all arrangements are up on the same GPUs, the others idle. The lowest worst figure "
        "of a row is bold."
    )


def readme_loaded_conditions(runs: Sequence[Run]) -> str:
    """Return the conditions of the runs under load that the README shows."""
    return (
        "Under load, in milliseconds: requests arrive at random for 12 s, prefix caching is off, top-p 0.95; "
        f"{_rounds(runs)} by turns, the other arrangements idle on the same GPUs. 1P1D hands over every request; 1P1D "
        "conditional is the default policy, `cost`, and hands over those for which that is predicted to pay. The "
        "lowest worst figure of a row is bold."
    )


def _rounds(runs: Sequence[Run]) -> str:
    found = {int(run.option("--rounds") or 1) for run in of_bench(runs, "isolation") if run.is_sampled}
    return " to ".join(str(number) for number in sorted({min(found), max(found)})) + " rounds"
