"""Figures in the documentation are those of the kept result files, with their conditions, and there are no others."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.result_files import result_run

from splitserve.benchmarks.kv.handover_ranks import STAGES
from splitserve.benchmarks.tables import kernels as results_kernels
from splitserve.benchmarks.tables import more_sections as results_more
from splitserve.benchmarks.tables import readme as results_readme
from splitserve.benchmarks.tables import sections as results_sections
from splitserve.benchmarks.tables import simulations
from splitserve.benchmarks.tables import write as results_table
from splitserve.benchmarks.tables.cells import extent, number, percent
from splitserve.benchmarks.tables.runs import Run, cited, read_runs

ROOT = Path(__file__).parents[2]
AWAKE = "--keep-cores-awake"
SPEED = re.compile(r"\d ?(ms|us|µs|GB/s|TB/s|TFLOP/s|tokens/s)\b|\d%|\btimes (as fast|faster)\b")

pytestmark = pytest.mark.skipif(not results_table.README.is_file(), reason="not a checkout")


def test_all_pages_are_what_the_files_say() -> None:
    for path, text in results_table.pages(read_runs()).items():
        assert path.read_text() == text, f"{path.name}: run python -m splitserve.benchmarks.tables.write"


def test_every_kept_file_is_in_the_tables() -> None:
    text = results_table.RESULTS_README.read_text()
    kept = read_runs()
    assert len(kept) == len(list(results_table.RESULTS_DIRECTORY.glob("*.json"))) > 0
    assert all(f"[{each.label}]({each.path.name})" in text for each in kept)
    unmarked = sum(not each.commit for each in kept)
    table = text[text.index("## Runs") :]
    assert table.count("**not recorded**") == unmarked


def outside_of_tables(path: Path) -> list[str]:
    """Lines with a speed that no test compares with the kept files: all but those between the markers."""
    before, _, rest = path.read_text().partition(results_table.BEGIN)
    _, _, after = rest.partition(results_table.END)
    return [line for line in (before + after).splitlines() if SPEED.search(line)]


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "docs/index.md", "docs/quickstart.md"])
def test_no_figure_stands_outside_of_the_tables(name: str) -> None:
    assert outside_of_tables(ROOT / name) == []


def test_best_beside_worst() -> None:
    assert extent([5.5, 4.25, 57.5]) == "4.25 to 57.5"
    assert extent([0.81, 0.694], percent, high=True) == "81.0% to 69.4%"
    assert extent([4.701, 4.704]) == "4.70"
    assert [number(value) for value in (0.123, 12.345, 1234.5)] == ["0.12", "12.3", "1,234"]


def test_runs_are_cited_by_commit_and_marked_without() -> None:
    old = result_run("isolation", "1122T000000", versions={"commit": "", "torch": "2.11.0"})
    unknown = result_run("isolation", "1122T000001", versions={"commit": "unknown", "torch": "2.11.0"})
    first, second = result_run(label="1123T000001"), result_run(label="1123T000002")
    assert cited([second, old, first, first, unknown]) == (
        "`abc1234`: 1123T000001, 1123T000002; commit not recorded: 1122T000000, 1122T000001"
    )
    row = results_sections.all_runs([old], {}).rows[0]
    assert row[2] == "**not recorded**" and row[3] == "2.11.0" and row[4] == "2 x H200"


def test_conditions_come_from_command_and_time() -> None:
    awake = result_run("latency", "1123T000000", "--keep-cores-awake", "--tail-chunk-tokens", "2048")
    assert awake.keeps_cores_awake and awake.last_chunk == 2048
    assert awake.unusual == "cores kept awake, last chunk 2048"
    assert result_run(time="2026-11-23T05:26:05+00:00").last_chunk == 512
    assert result_run(time="2026-11-23T05:26:07+00:00").last_chunk == 1024
    assert result_run().unusual == "none" and not result_run().keeps_cores_awake


def loaded(arrangement: str, gap: float) -> dict[str, Any]:
    figures = {"p50": gap / 4, "p99": gap / 2, "max": gap}
    return {
        "arrangement": arrangement,
        "gpus_or_workers": 2,
        "all": dict.fromkeys(("ttft_ms", "second_token_ms", "later_itl_ms", "itl_ms"), figures),
    }


def test_the_worst_of_all_runs_is_in_the_tables_and_two_mixed_workers_beside() -> None:
    load = ("--prompt-rate", "3", "--prompt-input-len", "8192", "--prompt-output-len", "64")
    runs = [
        result_run("isolation", "1123T000001", *load, results=[loaded("1P1D", 12.0), loaded("mixed", 20.0)]),
        result_run("isolation", "1123T000002", *load, results=[loaded("1P1D", 57.5), loaded("2 mixed", 16.0)]),
    ]
    rows = {row[1]: row[2:] for row in results_readme.loaded_rows(runs)}
    assert rows["longest gap"] == ["12.0 to 57.5", "20.0", "**16.0**"]
    assert rows["second token p99"] == ["6.00 to 28.8", "10.0", "**8.00**"]
    assert rows["runs"][0] == "`abc1234`: 1123T000001, 1123T000002"


def test_files_from_before_the_third_token_stand_beside_those_that_have_it() -> None:
    load = ("--prompt-rate", "3", "--prompt-input-len", "8192", "--prompt-output-len", "64", "--seconds", "12")
    old, new = loaded("1P1D", 12.0) | {"kept_up": True}, loaded("1P1D second token", 16.0) | {"kept_up": True}
    before = [result_run("isolation", "1123T000001", *load, results=[old])]
    assert all(row[1] != "third token p50" for row in results_readme.loaded_rows(before))
    assert not any("3rd" in header for header in results_sections.isolation(before).headers)

    new["all"] = new["all"] | {"third_token_ms": {"p50": 7.0, "p99": 9.0}}
    runs = [*before, result_run("isolation", "1123T000002", *load, results=[new])]
    rows = {row[1]: row[2:] for row in results_readme.loaded_rows(runs)}
    assert rows["third token p50"] == ["-", "**7.00**"] and rows["third token p99"] == ["-", "**9.00**"]
    section = results_sections.isolation(runs)
    column = section.headers.index("3rd token p50 ms")
    assert [row[1] for row in section.rows] == ["1P1D", "1P1D second token"]
    assert [row[column : column + 2] for row in section.rows] == [["-", "-"], ["7.00", "9.00"]]
    assert all(len(row) == len(section.headers) for row in section.rows)

    new["all"] = new["all"] | {"third_token_ms": {}}  # answers of two tokens
    assert results_readme.loaded_rows(runs[1:]) and results_sections.isolation(runs[1:]).rows


def test_second_tokens_at_prefill_are_told_from_first_ones_wherever_runs_share_a_table() -> None:
    whole = {"mode": "one chunk", "prompt_tokens": 4096, "place": "local", "prefill_ms": 40.0, "exposed_share": 0.05}
    whole |= {"handover_p50_ms": 2.0, "handover_p99_ms": 3.0, "exposed_p50_ms": 1.0, "exposed_p99_ms": 2.0}
    option, read = "--second-token-at-prefill", {"prefill_tp": 1, "decode_tp": 1, "prompt_tokens": 4096}
    read |= {"handover_ms": 1.0, "share_of_copy": 0.5}
    reads = [result_run("handover", f"1127T00001{len(cores)}", *cores, results=[read]) for cores in ((), (AWAKE,))]
    runs = [
        result_run("handover", "1127T000001", "--served", results=[whole]),
        result_run("handover", "1127T000002", "--served", option, results=[whole | {"handover_p50_ms": 1.0}]),
    ]
    rows = [row for row in results_readme.handover_rows([*reads, *runs]) if "decode ready" in row[0]]
    assert [(row[0].partition(" to ")[0], row[2]) for row in rows] == [
        ("first token", "p50 2.00 ms; p99 3.00 ms"),
        ("second token, drawn at prefill,", "p50 1.00 ms; p99 3.00 ms"),
    ]
    assert len([row for row in results_readme.handover_rows([*reads, runs[0]]) if "decode ready" in row[0]]) == 1
    assert [row[0] for row in results_sections.served(runs).rows] == ["one chunk", "one chunk, second token at prefill"]

    names = ("mixed_ttft_ms", "1P1D_ttft_ms", "ttft_ratio", "mixed_second_ms", "1P1D_second_ms", "mixed_step_ms")
    idle = dict.fromkeys((*names, "1P1D_step_ms", "second_beyond_step_ms"), 4.0) | {"prompt_tokens": 1024}
    runs = [
        result_run("latency", "1127T000003", results=[idle]),
        result_run(
            "latency", "1127T000004", option, results=[idle | {"1P1D_second_ms": 3.0, "third_beyond_step_ms": 2.0}]
        ),
    ]
    assert next(iter(results_readme.latency_rows(runs)))[2].count("second token 4.00 ms") == 1
    section = results_sections.latency(runs)
    assert [row[0] for row in section.rows] == ["1024", "1024, second token at prefill"]
    third = section.headers.index("3rd token, likewise")
    assert [row[third] for row in section.rows] == ["-", "2.00"], "there the hand-over shows"
    assert all(len(row) == len(section.headers) for row in section.rows)
    assert "3rd token, likewise" not in results_sections.latency(runs[:1]).headers


def test_documentation_shows_one_kind_of_gpu_and_the_results_page_names_each() -> None:
    load = ("--prompt-rate", "3", "--prompt-input-len", "8192", "--prompt-output-len", "64", "--seconds", "12")
    results = [loaded("1P1D", 12.0) | {"kept_up": True}]
    other = {"machine": {"gpus": ["NVIDIA H100 80GB HBM3, 580.1"] * 2}}
    runs = [
        result_run("isolation", "1123T000001", *load, results=results),
        result_run("isolation", "1123T000002", *load, results=results, **other),
        result_run("goodput", "1123T000003", **other),
        result_run("placement", "1123T000004", **other),
    ]
    assert [each.label[-1] for each in results_readme.shown(runs)] == ["1", "3", "4"]
    assert {row[2] for row in results_sections.isolation(runs).rows} == {"2 x H200", "2 x H100 80GB HBM3"}


def test_the_readme_has_each_loads_newest_commit_with_split_beside_mixed() -> None:
    results = [loaded(name, 12.0) | {"kept_up": True} for name in ("1P1D", "2 mixed", "conditional")]
    runs = [
        result_run(
            "isolation", f"1123T00000{number}", "--prompt-rate", rate, "--prompt-input-len", "8", "--prompt-output-len",
            "4", "--temperature", "0.8", results=results[first:], versions={"commit": commit},
        )
        for number, (rate, commit, first) in enumerate(
            (("3", "old", 0), ("16", "old", 0), ("3", "new", 0), ("3", "new", 0), ("3", "newest", 1))
        )
    ]  # fmt: skip
    assert [each.label[-1] for each in results_readme.newest_loaded(runs)] == ["1", "2", "3"]


def test_a_changed_file_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_table.main(["--check"]) == 0
    kept = read_runs()
    in_readme = results_readme.newest_loaded(results_readme.shown(kept))
    in_readme[-1].content["results"][0]["all"]["itl_ms"]["max"] = 5.75
    monkeypatch.setattr(results_table, "read_runs", lambda: kept)
    assert results_table.main(["--check"]) == 1
    assert capsys.readouterr().out.count("is out of date") == 3


def test_stages_of_hand_overs_have_a_table_where_runs_have_them() -> None:
    old = {"prefill_tp": 4, "decode_tp": 2, "prompt_tokens": 4096, "path": "mapped", "pool": "fresh"}
    old |= {"handover_ms": 1.1, "handover_p99_ms": 1.3, "share_of_copy": 0.7, "bytes_per_rank": 10**8}
    new = {**old, "one_rank": False, "ranks_per_device": 2, "copy_streams": 1}
    new["stages_us"] = {name: 100.0 + index for index, name in enumerate(STAGES)}
    runs = [result_run("handover", "1127T000001", results=[old, new])]
    section = results_sections.stages(runs)
    [row] = section.rows
    assert len(row) == len(section.headers)
    assert row[:7] == ["4:2", "2 x H200", "2", "4096", "fresh", "mapped, one stream", "default"]
    shown = dict(zip(section.headers, row, strict=True))
    assert shown["thread awake"] == number(new["stages_us"]["woken"])
    assert set(results_sections.STAGES) == set(STAGES), "of the bench"
    assert [row[5] for row in results_sections.reads(runs).rows] == ["mapped", "mapped, one stream"]


def test_steps_beside_prompts_of_several_runs_share_a_row() -> None:
    found = [
        {"batch": 16, "context": 2304, "prompt_tokens": size, "step_ms": ms} for size, ms in ((320, 13.0), (80, 8.8))
    ]
    models = {"m": {"mixed": found}}
    first = result_run("engine", "1128T000001", models=models)
    second = result_run("engine", "1128T000002", models={"m": {"mixed": [{**found[0], "step_ms": 12.5}]}, "older": {}})
    section = results_sections.mixed_steps([first, second])
    assert section.headers[-2:] == ["80", "320"]
    [row] = section.rows
    assert row[-4:] == ["16", "2304", "8.80", "12.5 to 13.0"]


def test_the_newest_commits_figures_stand_beside_those_of_all_runs() -> None:
    found = []
    for second, (commit, ms) in enumerate((("old1", 2.0), ("new2", 1.5), ("new2", 1.6))):
        versions = {"versions": {"commit": commit, "torch": "2.11.0"}}
        found.append((result_run("handover", f"1127T00000{second}", **versions), {"ms": ms}))
    row = results_readme.figure("a read", "idle", found, lambda some: [f"{results_readme.values(some, 'ms')} ms"])
    assert row[:4] == ["a read", "1.50 to 1.60 ms", "1.50 to 2.00 ms", "idle"]
    assert row[4] == "`old1`: 1127T000000; `new2`: 1127T000001, 1127T000002"
    assert results_readme.figure("a read", "idle", [], lambda some: [str(len(some))])[1:3] == ["0", "0"]


def started(ready: float, weights: float, place: str = "local") -> dict[str, Any]:
    stages = {"command": 0.3, "router": 2.0, "workers": ready - 0.1, "ready": ready, "first token": ready + 0.25}
    start = {**stages, "answer": ready + 0.5, "down": 1.0, "phases": {"mixed-0": {"imports": 2.0, "weights": weights}}}
    return {"place": place, **stages, "runs": [{**start, "ready": 60.0}, start]}


def test_a_mixed_worker_s_start_on_a_gpu_has_a_row_of_starts_with_kernels_built() -> None:
    options = {"prefill": 0, "decode": 0, "mixed": 1, "shape": "llama-3.1-8b", "model": ""}
    runs = [
        result_run("up", "1127T000001", "--device", "cuda", options=options, results=[started(11.0, 3.5)]),
        result_run("up", "1127T000002", options=options, results=[started(12.5, 4.0), started(20.0, 9.0, "Ray")]),
        result_run("up", "1127T000003", "--device", "cpu", options=options, results=[started(31.0, 9.0)]),
        result_run("up", "1127T000004", options=options | {"decode": 1}, results=[started(32.0, 9.0)]),
        result_run("up", "1127T000005", options=options | {"shape": "tiny"}, results=[started(33.0, 9.0)]),
    ]
    [row] = results_readme.start_rows(runs)
    shown = (
        "ready 11.0 to 12.5 s; first token 11.2 to 12.8 s; phases of the worker: imports 2.00, weights 3.50 to 4.00 s"
    )
    assert row[1:3] == [shown, shown]
    assert row[4] == "`abc1234`: 1127T000001, 1127T000002"
    assert list(results_readme.start_rows(runs[2:])) == []

    rows = results_more.starts(runs).rows
    assert len(rows) == 12 and len({len(each) for each in [results_more.starts(runs).headers, *rows]}) == 1
    first, second = rows[:2]
    assert first[1:5] == ["llama-3.1-8b, 1 mixed", "2 x H200", "local", "1"] and first[9] == "60.0"
    assert second[4:] == ["2", "0.30", "-", "2.00", "10.9", "11.0", "11.2", "11.5", "1.00", "imports 2.0, weights 3.5",
                          "abc1234"]  # fmt: skip
    assert rows[6][2] == "CPU"


def test_attention_of_decodes_stands_beside_the_other_backends() -> None:
    names = ("operation", "case", "rows", "backend", "us", "floor_share")
    figures = [
        ("make_attention", "decode, context 1024", 8, "triton", 10.0, 0.5),
        ("make_attention", "decode, context 1024", 8, "flashinfer", 20.0, 0.25),
        ("make_attention", "decode, one 32 times as long, context 1024", 8, "triton", 40.0, 0.8),
        ("make_attention", "prompt, context 1024", 1024, "triton", 1.0, 0.1),
        ("make_attention", "prompt, context 1024", 1024, "flashinfer", 1.0, 0.1),
        ("rms_norm", "4096", 8, "triton", 2.0, 0.1),
    ]
    kept = result_run("kernels", figures={"llama-3.1-8b": [dict(zip(names, each, strict=True)) for each in figures]})
    (row,) = results_kernels.decode_attentions([kept]).rows
    assert row[1:] == ["llama-3.1-8b", "8", "1024", "10.0", "20.0", "2.00", "50.0%", "abc1234"]


def test_simulated_clusters_have_a_row_each() -> None:
    figures = {"requests": 2400, "slo_attainment": 0.5, "goodput_requests_per_second": 5.0, "duration_seconds": 200.0}
    figures |= {"ttft_ms": {"p50": 90.0, "p99": 2500.0}, "tpot_ms": {"mean": 20.0}}
    better = figures | {"goodput_requests_per_second": 6.0}
    runs = [{"figures": each, "cpu_seconds": 50.0} for each in (better, figures)]
    content = {
        "workload": "8000/1000",
        "peak_bytes": 1 << 30,
        "clusters": [{"cluster": "4P4D:cost", "runs": runs}, {"cluster": "8M:cost", "runs": runs[1:]}],
        "command": ["splitserve", "bench", "simulate", "--rate", "12.5", "--ttft-ms", "3000", "--gpu", "B200"],
    }
    kept = Run(Path("simulate-20261124T190000-1.json"), "simulate", "1124T190000", content)
    first, second = simulations.user_rows([kept])
    assert first[:4] == [
        "8000/1000; 12.5 requests/s on average; TTFT at most 3000 ms",
        "4P4D:cost, B200, llama-3.1-8b",
        "2,400",
        "6.00",
    ]
    assert second[1].startswith("8M:cost") and second[3:5] == ["5.00", "50.0%"]
