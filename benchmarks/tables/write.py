"""Writer of the tables of the README, ``docs/benchmarks/`` and ``benchmarks/results/README.md`` from the kept results.

``python -m splitserve.benchmarks.tables.write`` writes them again, between the markers in these files; with ``--check``
the exit status tells whether they are up to date. Nothing in them is typed by hand but the notes below.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from splitserve.benchmarks.common.report import RESULTS_DIRECTORY
from splitserve.benchmarks.tables import goodputs, kernels, models, placement, simulations, twins
from splitserve.benchmarks.tables import more_sections as results_more
from splitserve.benchmarks.tables import readme as results_readme
from splitserve.benchmarks.tables import sections as results_sections
from splitserve.benchmarks.tables.cells import ARRANGEMENTS, Section, commit
from splitserve.benchmarks.tables.runs import Run, read_runs

BEGIN = "<!-- figures: made by `python -m splitserve.benchmarks.tables.write`, not by hand -->"
END = "<!-- end of figures -->"
README = RESULTS_DIRECTORY.parents[1] / "README.md"
USERS_PAGE = RESULTS_DIRECTORY.parents[1] / "docs" / "benchmarks" / "index.md"
DEVELOPERS_PAGE = USERS_PAGE.with_name("developers.md")
RESULTS_README = RESULTS_DIRECTORY / "README.md"
TAIL_CHUNK_PAIR = ("1123T052051", "1123T052217")
OTHER_GPUS_BUSY = "other benches ran on other GPUs of the machine"
OTHER_CORES_BUSY = "programs without GPU ran on other cores of the machine"
BEFORE_LATER_STEPS = "before steps were planned later"
SLEPT_THROUGH = "launches put off by up to 1 ms, and some slept through by the loop"
NOTES = {
    "1121T162929": OTHER_GPUS_BUSY,
    "1122T085207": OTHER_GPUS_BUSY,
    "1122T082730": f"older build; {OTHER_GPUS_BUSY}",
    "1122T142926": f"four GPUs, a rank each as far as they go; {OTHER_GPUS_BUSY}",
    "1122T171044": "one pair of GPUs with the next",
    "1122T171101": "same GPUs: large reads went by the transport, its cost measured while the probe was held up",
    "1122T172503": "rows of all copies in one call of the driver",
    "1122T172600": "right after it, a call for each copy",
    "1122T174946": "three arrangements in turn on the same two GPUs, with the next",
    "1122T181156": "with the next on one machine",
    "1122T181230": "the build of the day before",
    "1122T181022": "other benches on the other GPU",
    "1122T205633": "other benches on the other GPU",
    "1123T014640": "with the next at the same time on the other GPU",
    "1123T014720": "with the next on one machine, one after the other",
    "1123T013452": "the first of five on one machine, with cores kept awake and without by turns",
    "1123T031829": "half of what 4:2 reads is on the reader's own GPU",
    "1126T082820": OTHER_GPUS_BUSY,
    "1126T082836": OTHER_GPUS_BUSY,
    "1126T082858": OTHER_GPUS_BUSY,
    "1126T082923": OTHER_GPUS_BUSY,
    "1126T082955": OTHER_GPUS_BUSY,
    "1126T094832": OTHER_CORES_BUSY,
    "1126T094847": OTHER_CORES_BUSY,
    "1126T095127": OTHER_CORES_BUSY,
    "1126T095351": OTHER_CORES_BUSY,
    "1126T113341": "a step's draws no longer count as a part of its launch; with the next on one machine",
    "1126T113441": BEFORE_LATER_STEPS,
    "1126T115829": "with the next two on one machine, in turn",
    "1126T115841": f"{BEFORE_LATER_STEPS}; reads begun by their own thread, and polled",
    "1126T120026": f"{SLEPT_THROUGH}; with the next two on one machine",
    "1126T120129": BEFORE_LATER_STEPS,
    "1126T120228": SLEPT_THROUGH,
    "1126T121658": "with the next on one machine, which held up both more than other machines did",
    "1126T121855": BEFORE_LATER_STEPS,
    "1126T125544": "with the next five on one machine; prefill took a link it hadn't read over for one of 1 GB/s",
    "1126T125725": BEFORE_LATER_STEPS,
    "1126T130130": BEFORE_LATER_STEPS,
    "1128T035044": "the profiler slows prefills of 1,024 and 2,048 tokens",
    "1128T035107": "latent attention absorbed at all lengths, right after the run before on the same GPU",
}
SECTIONS: Sequence[Callable[[Sequence[Run]], Section]] = (
    results_sections.isolation,
    results_sections.latency,
    lambda runs: results_sections.last_chunk(runs, *TAIL_CHUNK_PAIR),
    results_sections.served,
    results_sections.reads,
    results_sections.stages,
    results_sections.steps,
    results_sections.mixed_steps,
    kernels.decode_attentions,
    results_sections.serving,
    results_more.tensor_parallel,
    results_more.all_reduce,
    results_more.hits,
    results_more.pace,
    results_more.throughput,
    results_more.tier_copies,
    results_more.starts,
    results_more.awake_cores,
    results_more.chaos,
    results_more.later_turns,
    goodputs.goodputs,
    goodputs.effects,
    simulations.simulations,
    twins.accuracy,
    twins.rankings,
    twins.cases,
    placement.placements,
)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def results_page(runs: Sequence[Run]) -> str:
    """Return the tables of every kept run."""
    sections = [*(make(runs) for make in SECTIONS), results_sections.all_runs(runs, NOTES)]
    parts = [
        f"## {section.title}\n\n" + (f"{section.conditions}\n\n" if section.conditions else "")
        + markdown(section.headers, section.rows)
        for section in sections
        if section.rows
    ]  # fmt: skip
    return "\n\n".join(parts)


def loaded_table(runs: Sequence[Run], *, with_runs: bool) -> str:
    columns = [ARRANGEMENTS[name] for name in results_readme.arrangements_of(runs)]
    headers = ["load", "", *columns]
    return markdown(headers, results_readme.loaded_rows(runs, with_runs=with_runs))


def readme_block(runs: Sequence[Run]) -> str:
    """Return the README's two tables and their conditions, without the names of runs."""
    shown = results_readme.newest_loaded(runs)
    loaded = loaded_table(shown, with_runs=False)
    rest = markdown(results_readme.HEADERS[:-1], results_readme.readme_rows(runs))
    return "\n\n".join([results_readme.conditions(runs), results_readme.readme_loaded_conditions(shown), loaded, rest])


def users_block(runs: Sequence[Run]) -> str:
    loaded = loaded_table(runs, with_runs=True)
    rest = markdown(results_readme.HEADERS, results_readme.user_rows(runs))
    conditions = f"{results_readme.conditions(runs)} {results_readme.RUN_NAMES}"
    parts = [conditions, "### Under load", results_readme.loaded_conditions(runs), loaded, "### Others", rest]
    if rows := goodputs.user_rows(runs):
        parts += ["### Goodput", goodputs.CONDITIONS, markdown(goodputs.HEADERS, rows)]
    if rows := simulations.user_rows(runs):
        parts += ["### Simulated", simulations.CONDITIONS, markdown([*simulations.HEADERS, "run"], rows)]
    tables = [markdown(headers, rows) for headers, rows in twins.user_parts(runs) if rows]
    if tables:
        parts += ["### Twins beside real runs", twins.CONDITIONS, *tables]
    return "\n\n".join(parts)


def developers_block(runs: Sequence[Run]) -> str:
    rows = markdown(results_readme.HEADERS, results_readme.developer_rows(runs))
    parts = [f"{results_readme.conditions(runs)} {results_readme.RUN_NAMES}", rows]
    if steps := models.step_rows(runs):
        parts += ["### Steps by model", models.CONDITIONS, markdown(models.HEADERS, steps)]
    if ways := models.way_rows(runs):
        parts += ["### Steps by way to draw", models.WAYS_CONDITIONS, markdown(models.WAYS_HEADERS, ways)]
    if turns := results_more.later_turns_rows(runs):
        table = markdown([*results_more.TURNS_HEADERS, "run"], turns)
        parts += ["### Later turns of conversations", results_more.TURNS_CONDITIONS, table]
    if tables := list(placement.sections(runs)):
        parts += ["### Placement", placement.CONDITIONS]
        parts += [f"{markdown(headers, cells)}\n\nRun {run.label}, `{commit(run)}`." for run, headers, cells in tables]
    return "\n\n".join(parts)


def with_block(text: str, block: str) -> str:
    """Return ``text`` with ``block`` between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"no {BEGIN} or no {END}"
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def pages(runs: Sequence[Run]) -> dict[Path, str]:
    """Return all pages with tables, as they should be."""
    shown = results_readme.shown(runs)
    blocks = {
        README: readme_block(shown),
        USERS_PAGE: users_block(shown),
        DEVELOPERS_PAGE: developers_block(shown),
        RESULTS_README: results_page(runs),
    }
    return {path: with_block(path.read_text(encoding="utf-8"), block) for path, block in blocks.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m splitserve.benchmarks.tables.write", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file would change")
    options = parser.parse_args(list(argv))
    old = [path for path, text in pages(read_runs()).items() if path.read_text(encoding="utf-8") != text]
    for path in old:
        print(f"{path} is out of date" if options.check else f"{path} is written anew")
        if not options.check:
            path.write_text(pages(read_runs())[path], encoding="utf-8")
    return 1 if options.check and old else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
