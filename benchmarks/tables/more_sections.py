"""More tables of ``benchmarks/results/README.md``: tiers, ranks, cores, faults. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitserve.benchmarks.tables.cells import Section, awake, commit, number, of_bench, percent, run_link
from splitserve.benchmarks.tables.runs import Run


def hits(runs: Sequence[Run]) -> Section:
    rows = [
        [str(hit["tokens"]), run_link(run), awake(run), number(hit["without_ttft_ms"]), number(hit["with_ttft_ms"]),
         number(hit["speedup"]), number(hit["resident_ttft_ms"]), number(hit["load_ms"]), commit(run)]
        for run in of_bench(runs, "tiers")
        for hit in run.content.get("hits", [])
    ]  # fmt: skip
    rows.sort(key=lambda row: (int(row[0]), row[1]))
    headers = ["prompt", "run", "cores", "computed, TTFT ms", "found in host memory", "times as soon"]
    text = (
        "`bench tiers --parts hits`: one request at a time (idle), greedy, medians; one mixed worker on one GPU "
        "with a tier of pinned host memory (off by default), another worker without on another GPU."
    )
    return Section("Prefixes in host memory", text, [*headers, "found on the device", "copies ms", "commit"], rows)


def pace(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "tiers"):
        if found := run.content.get("pace"):
            names = [f"{beside}_itl{p}_ms" for beside in ("quiet", "resident", "loads") for p in ("", "_p99")]
            share = f"{found['loads_over_quiet'] - 1:+.1%}"
            resident = f"{found['resident_itl_ms'] / found['quiet_itl_ms'] - 1:+.1%}"
            cells = [number(found[name]) for name in names]
            rows.append([run_link(run), awake(run), *cells, resident, share, str(found["loads"]), commit(run)])
    headers = ["run", "cores", "mean ITL alone, ms", "p99", "beside prompts found on the device", "p99"]
    headers += ["beside loads", "p99", "found on the device: mean", "loads: mean", "loads", "commit"]
    text = (
        "`bench tiers --parts pace`: 16 streams decode, greedy, while prompts of 4096 tokens arrive one after the"
        " other that are found in host memory (loads) or on the device."
    )
    return Section("Streams beside loads", text, headers, rows)


def throughput(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "tiers"):
        for part, name in (("no_reuse", "prompts that share nothing"), ("fits", "prompts that stay on the device")):
            if found := run.content.get(part):
                rates = [number(found[f"{arm}_requests_per_second"]) for arm in ("without", "with")]
                ratios = found.get("throughput_ratios", [])
                spread = f"{min(ratios):.4f} to {max(ratios):.4f}" if ratios else "not kept"
                row = [
                    name,
                    run_link(run),
                    awake(run),
                    *rates,
                    f"{found['throughput_ratio']:.4f}",
                    spread,
                    commit(run),
                ]
                rows.append(row)
    headers = [
        "load",
        "run",
        "cores",
        "requests/s without a tier",
        "with",
        "median ratio",
        "of single rounds",
        "commit",
    ]
    text = (
        "`bench tiers --parts no_reuse fits`: 16 requests at once, 1024 in, 128 out, greedy, 16 rounds by turns; "
        "what a host tier costs where nothing comes back."
    )
    return Section("Throughput with a host tier", text, headers, rows)


def tensor_parallel(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "tensor-parallel"):
        one, *others = run.content["results"]
        for case, milliseconds in one["milliseconds"].items():
            for other in others:
                ms = other["milliseconds"][case]
                busy = [percent(each["busy"][case]) if case in each["busy"] else "-" for each in (one, other)]
                cells = [
                    Path(run.content["model"]).name,
                    case,
                    f"{other['ranks']} x {run.gpu}",
                    number(milliseconds),
                    number(ms),
                    number(milliseconds / ms),
                ]
                rows.append([*cells, *busy, run_link(run), commit(run)])
    headers = [
        "model",
        "case",
        "ranks",
        "one rank ms",
        "these ranks ms",
        "times as fast",
        "busy, one rank",
        "rank 0",
        "run",
    ]
    text = (
        "`bench tensor-parallel`: a GPU for each rank, greedy, without HTTP, nothing else on them; `after_us` of "
        "the kernels in the files is what each adds to the step."
    )
    return Section("Several ranks", text, [*headers, "commit"], rows)


def all_reduce(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "all-reduce"):
        for result in run.content["results"]:
            times = [number(result["microseconds"][n]) if n in result["microseconds"] else "-" for n in WAYS]
            ranks = f"{run.content['ranks']} x {run.gpu}"
            size = f"{result['num_bytes'] // 1024} KiB"
            rows.append([ranks, size, *times, result["best"], run_link(run), commit(run)])
    text = "`bench all-reduce`: microseconds of a sum over ranks in a CUDA graph, nothing else on the GPUs."
    return Section("Sums over ranks", text, ["ranks", "size", *WAYS, "best", "run", "commit"], rows)


WAYS = ("nccl", "flagless", "one-shot")

TURNS_HEADERS = (
    "model", "arm", "requests", "TTFT p50 ms, later turns", "below the first arm's", "p99 ms", "first turns p50 ms",
    "ITL p50 ms", "prompt tokens not computed, later turns", "blocks read from the other worker", "on one worker",
    "same answers",
)  # fmt: skip
TURNS_CONDITIONS = (
    "`bench placement --cases turns`: conversations one at a time on a real prefill and a real decode worker. First "
    "prompt 1,024 tokens, then four turns of 64 new tokens, each turn 256 out, greedy, no objectives. Small: a random "
    "model of 26 million parameters in float32; on CPU with a thread each, router and client share their cores. 8B: "
    "Llama-3.1-8B's shape in bfloat16, random weights. On GPUs the clusters of all arms share two. Always: each "
    "request goes to the pair; with output hashes prefill reads the turn before from the decode worker that wrote it. "
    "Default: policy `cost`. The arms' clusters take turns. Same answers: as the first arm's, in all turns; in "
    "bfloat16 rounding may decide a token. Blocks read include the warm-up's. The 8B run of 1126T125544 reads none: "
    "the router took a link that prefill hadn't read over for one of 1 GB/s; it now takes the rate of hand-overs there."
)


def later_turns(runs: Sequence[Run]) -> Section:
    rows = [[run_link(run), *cells, commit(run)] for run, cells in _turns_cells(runs)]
    return Section("Later turns of conversations", TURNS_CONDITIONS, ["run", *TURNS_HEADERS, "commit"], rows)


def later_turns_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the developers' page."""
    return [[*cells, run.label] for run, cells in _turns_cells(runs)]


def _turns_cells(runs: Sequence[Run]) -> Iterator[tuple[Run, list[str]]]:
    for run in of_bench(runs, "placement"):
        rows = run.content["cases"].get("turns", [])
        for row in rows:
            is_exact, on_gpus = row.get("dtype", "float32") == "float32", row.get("device", "cpu") == "cuda"
            assert row["same_answers"] or not is_exact, f"{run.path.name}: the arms' answers differ"
            model = ("small" if is_exact else "8B") + (", 2 GPUs" if on_gpus else ", CPU")
            yield run, [
                model, row["arm"], str(row["requests"]), number(row["ttft_p50_ms"]), percent(row["ttft_p50_below"]),
                *(number(row[name]) for name in ("ttft_p99_ms", "first_ttft_p50_ms", "itl_p50_ms")),
                percent(row["cached_share"]), str(row.get("read_blocks", "-")), percent(row["local_share"]),
                "yes" if row["same_answers"] else "no",
            ]  # fmt: skip


def tier_copies(runs: Sequence[Run]) -> Section:
    rows = [
        [f"{result['block_kib']:.0f} KiB", *(number(result[name]) for name in ("plain_up_gb_per_s", "up_gb_per_s")),
         percent(result["up_share"]), number(result["plain_down_gb_per_s"]), number(result["down_gb_per_s"]),
         percent(result["down_share"]), number(result["both_gb_per_s"]), run_link(run), commit(run)]
        for run in of_bench(runs, "tier-copies")
        for result in run.content["results"]
    ]  # fmt: skip
    headers = ["block", "plain copy up GB/s", "blocks up", "share", "plain copy down GB/s", "blocks down", "share"]
    text = "`bench tier-copies`: scattered blocks between a GPU and pinned host memory by copy engines; idle."
    return Section("Copies to and from host memory", text, [*headers, "both ways at once", "run", "commit"], rows)


UP_STAGES = ("command", "Ray", "router", "workers", "ready", "first token", "answer", "down")


def starts(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "up"):
        options = run.content["options"]
        counts = ((options[role], role) for role in ("prefill", "decode", "mixed"))
        workers = ", ".join(f"{count} {role}" for count, role in counts if count)
        model = options["shape"] or ("a checkpoint" if options["model"] else "demo")
        device = "CPU" if run.option("--device") == "cpu" or run.gpus == "none" else run.gpus
        for result in run.content["results"]:
            for number_of_start, start in enumerate(result["runs"], 1):
                seconds = [number(start[stage]) if stage in start else "-" for stage in UP_STAGES]
                cells = [f"{model}, {workers}", device, result["place"], str(number_of_start), *seconds]
                rows.append([run_link(run), *cells, _longest_start(start["phases"]), commit(run)])
    headers = ["run", "cluster", "GPUs of the machine", "place", "start", *(f"{stage} s" for stage in UP_STAGES)]
    text = (
        "`bench up`: seconds from the start of `splitserve up` to each stage; `down` by itself. The first start builds "
        "the kernels that the machine lacks. Phases are those of the worker that took longest; they may overlap."
    )
    return Section("From the command to the first token", text, [*headers, "phases of a worker", "commit"], rows)


def _longest_start(phases: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the phases of the worker that took longest, by their sum; "-" if none are known."""
    longest = max(phases.values(), key=lambda each: sum(each.values()), default={})
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest.items()) or "-"


def awake_cores(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "awake-cores"):
        for name, found in run.content["results"].items():
            late = [number(found[f"late_{which}_us"]) for which in ("p50", "p99", "p999", "max")]
            rows.append([name, *late, f"{1e4 * found['held_up_share']:.2f}", run_link(run), commit(run)])
    headers = ["cores", "wake up late by p50 us", "p99", "p99.9", "max", "held up per 10,000 turns", "run", "commit"]
    text = "`bench awake-cores`: threads that sleep and compute, no model; all cores of the machine were idle else."
    return Section("Cores kept awake", text, headers, rows)


def chaos(runs: Sequence[Run]) -> Section:
    rows = []
    for run in of_bench(runs, "chaos"):
        found = run.content
        wrong = found["checks"]["all requests complete with the quiet run's tokens"]
        ties = found.get("near_ties", found.get("unstable_cases"))
        for fault, hit in found["recovery"].items():
            times = [number(hit[name]) if name in hit else "-" for name in ("p50_ms", "p99_ms")]
            rows.append(
                [run_link(run), _chaos_steps(found["options"]), str(found["requests"]),
                 "none" if wrong == "ok" else str(len(wrong)), str(ties), fault,
                 str(hit["faults"]), str(hit["requests"]), *times, commit(run)]
            )  # fmt: skip
    headers = ["run", "steps", "requests", "wrong answers", "near-ties", "fault", "times", "requests hit"]
    text = (
        "`bench chaos`, short form: 2P2D with a tiny checkpoint on two GPUs, 12 streams all the time, one of four "
        "sampled with a seed. The next token of a frozen worker's stream comes after the freeze is detected; a drain "
        "is no fault for its requests. Near-ties: answers that differ only where rounding in this dtype may decide."
    )
    return Section("Workers that die", text, [*headers, "next token p50 ms", "p99", "commit"], rows)


def _chaos_steps(options: Mapping[str, Any]) -> str:
    return f"{options.get('dtype', 'float32')}, {'CUDA graphs' if options.get('cuda_graphs') else 'eager'}"
