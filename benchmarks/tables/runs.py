"""Result files as runs: the measured code and the conditions. Pure, except for reading the files."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from splitserve.benchmarks.common.report import RESULTS_DIRECTORY

NO_COMMIT = "not recorded"
SMALL_LAST_CHUNK_UNTIL = "2026-11-23T05:26:06"
"""End of the time when the last chunk of a long prompt had 512 tokens on a GPU by default; since then it has 1024."""
SWITCHES = {
    "--enforce-eager": "launched kernel by kernel",
    "--keep-cores-awake": "cores kept awake",
    "--second-token-at-prefill": "second token at prefill",
    "--one-rank": "one rank of decode alone on its GPU",
    "--profile": "profiled after timing",
}
WITHOUT_GPU = frozenset(("placement", "router-limits", "simulate", "twin"))  # benches that use none where there is one
_NAME = re.compile(r"(?P<bench>[a-z-]+)-20\d\d(?P<label>\d{4}T\d{6})-\d+")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One result file."""

    path: Path
    bench: str
    label: str  # month, day and time, unique among the kept ones
    content: dict[str, Any]

    @property
    def commit(self) -> str:
        """Commit of the measured code; empty if the file doesn't name it."""
        found = str(self.content["versions"].get("commit", ""))
        return "" if found == "unknown" else found

    @property
    def torch(self) -> str:
        return str(self.content["versions"]["torch"])

    @property
    def gpus(self) -> str:
        """The machine's GPUs, of a bench that uses them."""
        if self.bench in WITHOUT_GPU:
            return "none"
        names = [gpu.partition(",")[0].removeprefix("NVIDIA ") for gpu in self.content["machine"]["gpus"]]
        return f"{len(names)} x {names[0]}" if names else "none"

    @property
    def gpu(self) -> str:
        """The kind of the machine's GPUs, of a bench that uses them."""
        return self.gpus.rpartition(" x ")[2]

    def option(self, name: str) -> str:
        """Return the value of a command's option; empty without it."""
        command = self.content["command"]
        return str(command[command.index(name) + 1]) if name in command else ""

    @property
    def is_served(self) -> bool:
        """True for a run of whole hand-overs in a cluster."""
        return "--served" in self.content["command"]

    @property
    def shape(self) -> str:
        """Shape of the model, of benches that run Llama-3.1-8B's without an option."""
        return self.option("--shape") or "llama-3.1-8b"

    @property
    def is_sampled(self) -> bool:
        return self.option("--temperature") not in ("", "0")

    @property
    def has_graphs(self) -> bool:
        return "--enforce-eager" not in self.content["command"]

    @property
    def keeps_cores_awake(self) -> bool:
        return "--keep-cores-awake" in self.content["command"]

    @property
    def draws_second_tokens(self) -> bool:
        """True if prefill may draw the second token, too; of ``bench isolation`` the arrangement's name says so."""
        return "--second-token-at-prefill" in self.content["command"]

    @property
    def last_chunk(self) -> int:
        """Tokens of the last chunk of a long prompt that is handed over."""
        if given := self.option("--tail-chunk-tokens"):
            return int(given)
        return 512 if self.content["time"] < SMALL_LAST_CHUNK_UNTIL else 1024

    @property
    def unusual(self) -> str:
        """Return the options that are off by default, in words."""
        found = [text for switch, text in SWITCHES.items() if switch in self.content["command"]]
        if prefix := self.option("--prefix"):
            found.append(f"after {prefix} tokens in KV")
        if self.option("--ray"):
            found.append("also on Ray")
        if chunk := self.option("--tail-chunk-tokens"):
            found.append(f"last chunk {chunk}")
        return ", ".join(found) or "none"


def read_runs(directory: Path = RESULTS_DIRECTORY) -> list[Run]:
    """Read all result files of ``directory``, oldest first."""
    runs = []
    for path in directory.glob("*.json"):
        match = _NAME.fullmatch(path.stem)
        assert match is not None, f"{path.name} isn't called <bench>-<UTC time>-<pid>.json"
        runs.append(Run(path, match["bench"], match["label"], msgspec.json.decode(path.read_bytes())))
    assert len({run.label for run in runs}) == len(runs), "two results have one time"
    return sorted(runs, key=lambda run: run.label)


def cited(runs: Iterable[Run]) -> str:
    """Name ``runs`` by commit, each once: ``b1af1c6: 1123T013452, 1123T013523``; those without a commit last."""
    commits: dict[str, list[Run]] = {}
    for run in sorted(set(runs), key=lambda run: (not run.commit, run.label)):
        commits.setdefault(run.commit, []).append(run)
    return "; ".join(
        f"{f'`{short(commit)}`' if commit else f'commit {NO_COMMIT}'}: {', '.join(run.label for run in found)}"
        for commit, found in commits.items()
    )


def short(commit: str) -> str:
    """Return a commit with its hash cut to twelve digits, and whether there were changes."""
    digest, plus, changes = commit.partition("+")
    return digest[:12] + plus + changes
