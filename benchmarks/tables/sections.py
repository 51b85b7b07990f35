"""Tables of ``benchmarks/results/README.md``: the kept results of each bench, run by run. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from splitserve.benchmarks.tables.cells import Section, awake, commit, extent, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run

GREEDY = "greedy"  # as splitserve.benchmarks.engine.sampling_modes calls it

SHAPE = "llama-3.1-8b"


def all_runs(runs: Sequence[Run], notes: dict[str, str]) -> Section:
    rows = []
    for run in runs:
        note = notes.get(run.label, "")
        rows.append([run_link(run), run.bench, commit(run), run.torch, run.gpus, run.unusual, note])
    headers = ["run", "bench", "commit", "torch", "GPUs of the machine", "options off by default", "note"]
    return Section("Runs", "", headers, rows)


def steps(runs: Sequence[Run]) -> Section:
    cases: dict[tuple[str, str, str, int, int, str], list[tuple[Run, dict[str, Any]]]] = {}
    for run in of_bench(runs, "engine"):
        for model, found in run.content["models"].items() if run.has_graphs else ():
            for figure in found["decode"]:
                case = (model, run.gpu, "decode", figure["batch"], figure["context"], figure.get("sampling", GREEDY))
                cases.setdefault(case, []).append((run, figure))
            for figure in [] if run.option("--prefix") else found["prefill"]:
                cases.setdefault((model, run.gpu, "prefill", figure["tokens"], 0, GREEDY), []).append((run, figure))
    rows = []
    for (model, gpu, phase, size, context, sampling), found in sorted(cases.items()):
        figures = [figure for _, figure in found]
        labels = ", ".join(run_link(run) for run, _ in found)
        if phase == "decode":
            reads = [figure["read_floor_share"] for figure in figures if "read_floor_share" in figure]
            shares = [extent([f["floor_share"] for f in figures], percent, high=True)]
            shares += [extent(reads, percent, high=True) if reads else "not measured", "-"]
            busy = [share for figure in figures if (share := figure["busy_share"])]
            shares += [extent(busy, percent, high=True) if busy else "not measured"]
            drawn = "" if sampling == GREEDY else f", {sampling}"
            rows.append(
                [
                    model,
                    gpu,
                    f"decode {size} x {context}{drawn}",
                    extent([f["step_ms"] for f in figures]),
                    *shares,
                    labels,
                ]
            )
        else:
            share = extent([f["gemm_share"] for f in figures], percent, high=True)
            if beside := [each for f in figures if (each := f.get("beside_share"))]:
                share += f"; beside {extent(beside, percent, high=True)}"
            rows.append(
                [model, gpu, f"prefill {size}", extent([f["ms"] for f in figures]), "-", "-", share, "-", labels]
            )
    headers = ["shape", "GPU", "case", "ms", "of copy floor", "of read floor", "of GEMM rate", "device busy", "runs"]
    text = (
        "`bench engine`: one GPU, nothing else on it, greedy unless said, without HTTP. Shares are of what the same "
        "run measured: a floor is the time to read weights and KV once, at the bandwidth of a large copy (read and "
        "written) or of an operation that only reads. *Beside*: of products that take turns with the prefills, "
        "as long as these; the others are a short burst's. Best to worst of the runs."
    )
    return Section("Steps on one GPU", text, headers, rows)


def mixed_steps(runs: Sequence[Run]) -> Section:
    cases: dict[tuple[str, str, int, int], dict[int, list[float]]] = {}
    for run in of_bench(runs, "engine"):
        for model, found in run.content["models"].items() if run.has_graphs else ():
            for figure in found.get("mixed", []):
                case = (model, run.gpu, figure["batch"], figure["context"])
                cases.setdefault(case, {}).setdefault(figure["prompt_tokens"], []).append(figure["step_ms"])
    sizes = sorted({size for found in cases.values() for size in found})
    rows = [
        [*map(str, case), *(extent(found[size]) if size in found else "-" for size in sizes)]
        for case, found in sorted(cases.items())
    ]
    text = (
        "`bench engine --mixed`: milliseconds of a step in which the given number of sequences decodes beside 16 to "
        "640 tokens of a prompt, which come after half of the context. Of several commits, best to worst: 400, 480 "
        "and 640 are of one whose graphs had 480 and 640 tokens, 448 and 576 of one whose graphs had these."
    )
    return Section("Steps beside prompts", text, ["shape", "GPU", "sequences", "context", *map(str, sizes)], rows)


def serving(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "serve"):
        found, rate = run.content["figures"], run.option("--request-rate")
        load = f"{rate} requests/s" if rate != "inf" else f"{run.option('--max-concurrency')} at once, all the time"
        lengths = f"{run.option('--input-len')} / {run.option('--output-len')}"
        reports = found.get("profile", {}).values()
        busy = [f"{percent(each['device_busy_share'])} of {each['seconds']:.2f} s" for each in reports]
        ttft, itl = found["ttft_ms"], found["itl_ms"]
        rows.append(
            [run_link(run), load, lengths, *(number(ttft[name]) for name in ("p50", "p99")),
             *(number(itl[name]) for name in ("p50", "p99", "max")), number(found["output_tokens_per_second"]),
             ", ".join(busy) or "-", commit(run)]
        )  # fmt: skip
    headers = ["run", "load", "tokens in / out", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "max", "tokens/s"]
    text = (
        "`bench serve` from `benchmarks/gpu/serving.sh ttft busy itl`: one mixed worker on one GPU through HTTP, "
        "greedy, `splitserve serve MODEL --mixed 1 --device cuda --dtype bfloat16 --load-format dummy`."
    )
    return Section("One mixed worker", text, [*headers, "device busy", "commit"], rows)


def isolation_load(run: Run) -> str:
    lengths = f"{run.option('--prompt-input-len')} in, {run.option('--prompt-output-len')} out"
    drawn = f", sampled at {run.option('--temperature')}" if run.is_sampled else ""
    return f"{run.option('--prompt-rate')} requests/s, {lengths}{drawn}"


_GAPS = {
    "TTFT": ("ttft_ms", ("p50", "p99")),
    "2nd token": ("second_token_ms", ("p50", "p99")),
    "3rd token": ("third_token_ms", ("p50", "p99")),
    "later ITL": ("later_itl_ms", ("p99",)),
    "ITL": ("itl_ms", ("p50", "p99", "max")),
}
"""Figures of loaded arrangements by title: their name in the result, and which of its values."""


def isolation(runs: Sequence[Run]) -> Section:
    found = [(run, result) for run in of_bench(runs, "isolation") for result in run.content["results"]]
    gaps = {title: figure for title, figure in _GAPS.items() if any(each["all"].get(figure[0]) for _, each in found)}
    rows = []
    for run, result in found:
        assert run.option("--seconds") == "12", f"{run.path.name}: the text below says 12 s"
        assert result["kept_up"], f"{run.path.name}: figures of an arrangement that fell behind aren't comparable"
        figures = [
            number(result["all"][name][which]) if result["all"].get(name) else "-"
            for name, names in gaps.values()
            for which in names
        ]
        arrangement = result["arrangement"]
        chunk = "-" if "mixed" in arrangement else str(run.last_chunk)
        gpus = f"{result['gpus_or_workers']} x {run.gpu}"
        head = [isolation_load(run), arrangement, gpus, run_link(run), awake(run), chunk]
        rows.append([*head, *figures, commit(run)])
    order = ["1P1D", "1P1D second token", "conditional", "conditional second token", "mixed", "2 mixed"]
    rows.sort(key=lambda row: (row[0], order.index(row[1]), row[3]))
    headers = ["load", "arrangement", "GPUs", "run", "cores", "last chunk"]
    for title, (_, (first, *others)) in gaps.items():
        headers += [f"{title} {first} ms", *others]
    headers.append("commit")
    text = (
        "`bench isolation`: requests arrive for 12 s at random times (Poisson), whether or not earlier ones are "
        "done; all kept up; greedy unless the load names a temperature, through HTTP, prefix caching off. ITL are all "
        "gaps of all requests; the 2nd token is the first of them, where 1P1D hands over; later ITL are the others. "
        "1P1D and two mixed workers have two GPUs, one mixed worker has one; conditional is 1P1D that hands over only "
        "where that is predicted to pay. A run of several rounds has a row for each; its other arrangements were up, "
        "idle, on the same GPUs. At 3 requests/s second tokens are "
        "1.6% of all gaps (36 of 2,268), so p99 of ITL is one of them."
    )
    if "3rd token" in gaps:
        text += (
            " With second tokens at prefill the hand-over comes before the 3rd token: compare the gaps before both. "
            "Earlier runs have none of it (-)."
        )
    return Section("1P1D against mixed workers, loaded", text, headers, rows)


def latency(runs: Sequence[Run]) -> Section:
    found = [(run, result) for run in of_bench(runs, "latency") for result in run.content["results"]]
    has_third = any("third_beyond_step_ms" in result for _, result in found)
    names = ["mixed_ttft_ms", "1P1D_ttft_ms", "ttft_ratio", "mixed_second_ms", "1P1D_second_ms"]
    names += ["mixed_step_ms", "1P1D_step_ms", "second_beyond_step_ms"]
    names += ["third_beyond_step_ms"] if has_third else []
    rows = [
        [str(result["prompt_tokens"]) + _second_words(run), run_link(run), awake(run), str(run.last_chunk),
         *(number(result[n]) if n in result else "-" for n in names), commit(run)]
        for run, result in found
    ]  # fmt: skip
    rows.sort(key=lambda row: (int(row[0].partition(",")[0]), row[1]))
    headers = ["prompt", "run", "cores", "last chunk", "TTFT mixed ms", "1P1D", "ratio", "2nd token mixed ms", "1P1D"]
    headers += ["later steps mixed ms", "1P1D", "1P1D's 2nd token beyond its steps, ms"]
    headers += [*(["3rd token, likewise"] if has_third else []), "commit"]
    text = (
        "`bench latency`: one request at a time on an idle system, greedy, medians of 9 or 11, prefix caching "
        "off; 1P1D has two GPUs, the mixed worker one; the clusters take turns. A second mixed worker would be "
        "idle, so these are its figures as well."
    )
    return Section("1P1D against a mixed worker, idle", text, headers, rows)


def _second_words(run: Run) -> str:
    return ", second token at prefill" if run.draws_second_tokens else ""


def last_chunk(runs: Sequence[Run], small: str, large: str) -> Section:
    """Return the pair of latency runs on one machine that differ only in the last chunk."""
    pair = [next(run for run in runs if run.label == label) for label in (small, large)]
    rows = []
    for left, right in zip(*(run.content["results"] for run in pair), strict=True):
        row = [str(left["prompt_tokens"])]
        for name in ("1P1D_ttft_ms", "1P1D_second_ms", "second_beyond_step_ms"):
            row += [number(left[name]), number(right[name]), f"{right[name] - left[name]:+.2f}"]
        rows.append(row)
    headers = ["prompt", "TTFT at 512, ms", "at 1024", "difference", "2nd token at 512, ms", "at 1024", "difference"]
    headers += ["beyond a step at 512, ms", "at 1024", "difference"]
    text = (
        f"Runs {run_link(pair[0])} and {run_link(pair[1])}, one after the other on one machine, idle, greedy, cores "
        "kept awake, medians of 9. One pair: the scatter between runs isn't known."
    )
    return Section("Last chunk: 512 against 1024 tokens", text, headers, rows)


def readings(runs: Iterable[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Return the results of KV read from another process."""
    return [(run, each) for run in of_bench(runs, "handover") if not run.is_served for each in run.content["results"]]


def reads(runs: Sequence[Run]) -> Section:
    cases: dict[tuple[Any, ...], list[tuple[Run, dict[str, Any]]]] = {}
    for run, result in readings(runs):
        one = result.get("one_rank", False)
        pair = (result["prefill_tp"], result["decode_tp"])
        reader = "one rank" if one else f"{pair[1]} ranks" if max(pair) > 1 else "one"
        gpus = f"2 x {run.gpu}" if one or pair == (1, 1) else run.gpus
        case = (*pair, reader, gpus, result["prompt_tokens"], awake(run), _path(result))
        cases.setdefault(case, []).append((run, result))
    rows = []
    for case, found in sorted(cases.items()):
        prefill, decode, reader, gpus, tokens, cores, path = case
        results = [result for _, result in found]
        names = ("handover_ms", "handover_p99_ms", "share_of_copy")
        ms, p99, shares = ([result[name] for result in results] for name in names)
        rows.append(
            [f"{prefill}:{decode}", reader, gpus, str(tokens), cores, path, extent(ms), number(max(p99)),
             number(results[0]["bytes_per_rank"] / 1e6), extent(shares, percent, high=True),
             ", ".join(dict.fromkeys(run_link(run) for run, _ in found))]
        )  # fmt: skip
    headers = ["ranks, prefill:decode", "readers", "GPUs", "prompt", "cores", "path", "median ms", "worst p99 ms"]
    text = (
        "`bench handover`: KV read from another process, blocks of 64 tokens, no model running and nothing else "
        "on these GPUs (idle); best to worst of fresh and shuffled pools in all runs. The share is of what a "
        "plain copy of as many bytes by the same ranks at once reaches. With more ranks than GPUs ranks share "
        "them, so some of what they read is on their own GPU or comes over one link."
    )
    return Section("Hand-over between GPUs", text, [*headers, "MB per rank", "of a plain copy", "runs"], rows)


def _path(result: dict[str, Any]) -> str:
    """Return the path of a read; where heads are split differently, with the number of streams that a run chose."""
    is_of_rows = result["path"] == "mapped" and result["prefill_tp"] != result["decode_tp"]
    return "mapped, one stream" if is_of_rows and result.get("copy_streams") == 1 else str(result["path"])


STAGES = {
    "commanded": "commanded",
    "woken": "thread awake",
    "queued": "all copies queued",
    "copied": "data landed",
    "verified": "verified",
    "noticed": "noticed after",
}


def stages(runs: Sequence[Run]) -> Section:
    rows = []
    for run, result in readings(runs):
        if "stages_us" not in result:
            continue
        reader = "one rank" if result["one_rank"] else f"{result['prefill_tp']}:{result['decode_tp']}"
        shown = [number(result["stages_us"][name]) for name in STAGES]
        rows.append(
            [reader, run.gpus, str(result["ranks_per_device"]), str(result["prompt_tokens"]), result["pool"],
             _path(result), awake(run), number(result["handover_ms"]), *shown, run_link(run), commit(run)]
        )  # fmt: skip
    headers = ["ranks", "GPUs", "ranks per GPU at most", "prompt", "blocks", "path", "cores", "median ms"]
    text = (
        "`bench handover`: the slowest rank's stages, medians in microseconds from a read's command, but for the last "
        "one: from the verified result until the commanding thread has it."
    )
    return Section("Stages of a hand-over", text, [*headers, *STAGES.values(), "run", "commit"], rows)


def served(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "handover"):
        for result in run.content["results"] if run.is_served else []:
            names = ("handover_p50_ms", "handover_p99_ms", "exposed_p50_ms", "exposed_p99_ms", "prefill_ms")
            rows.append(
                [result["mode"] + _second_words(run), str(result["prompt_tokens"]), run.shape, result["place"],
                 run_link(run), awake(run),
                 str(run.last_chunk) if result["mode"] == "chunks" else "-", *(number(result[name]) for name in names),
                 percent(result["exposed_share"]),
                 f"{result['equal']} of {result['compared']}" if "equal" in result else "-", commit(run)]
            )  # fmt: skip
    rows.sort(key=lambda row: (row[0].startswith("chunks"), int(row[1]), row[2] != "llama-3.1-8b", row[4], row[3]))
    headers = [
        "mode",
        "prompt",
        "model",
        "place",
        "run",
        "cores",
        "last chunk",
        "first token to decode ready p50 ms",
        "p99",
    ]
    text = (
        "`bench handover --served`: a running 1P1D cluster on two GPUs, one request at a time (idle), chunks of 2048, "
        "30 requests each (8 where tokens are compared), greedy; in runs up to 1123T052825 the time of the prefill "
        "comes from requests without a temperature, which are sampled. Exposed is what decode waited for blocks after "
        "it knew of the last ones; its share is of the prefill. Same tokens: 32 tokens of an answer against those of a "
        "mixed worker."
    )
    if any(run.is_served and run.draws_second_tokens for run in of_bench(runs, "handover")):
        text += " Where prefill drew the second token, too, the time to decode ready is that from the second one."
    headers += ["exposed p50 ms", "p99", "prefill ms", "exposed share", "same tokens", "commit"]
    return Section("Whole hand-overs", text, headers, rows)
