"""The files of a comparison. Probes are kept one by one, so that an interrupted run loses none."""

import csv
import datetime
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splitserve.benchmarks.goodput.arms import Arm, parse_arm
from splitserve.benchmarks.goodput.estimate import Probe
from splitserve.benchmarks.goodput.objectives import Objectives
from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.verdict import Verdict, judge
from splitserve.common.errors import ConfigError

PROBES_FOLDER = "probes"
SUMMARY_FILE = "goodput.json"
SIMULATED = {"simulated_ttft_ms": "ttft_ms", "simulated_itl_ms": "itl_ms", "simulated_goodput": "goodput"}
"""Columns of the arm's twin, with their names in a probe; empty for an arm without one."""
COLUMNS = (
    "arm", "rate", "offered_rate", "pressure", "ttft_ms", "itl_ms", "longest_gap_ms", "second_token_p50_ms",
    "second_token_p99_ms", "tpot_mean_ms", "requests", "failed", "kills", "cached_share", *SIMULATED,
)  # fmt: skip


class Conditions(msgspec.Struct, kw_only=True):
    """Conditions of a comparison: a folder is continued only under the same ones."""

    workload: str
    ttft_ms: float
    itl_ms: float
    percentile: float
    num_requests: int
    arms: list[str]
    seed: int
    temperature: float
    top_p: float
    kill_seconds: float
    model: str
    endpoints: dict[str, str] = {}
    min_seconds: float = 0.0
    rates: list[float] = []  # of a sweep; empty: a search
    settings: dict[str, Any] = {}  # of the engine, as far as they aren't defaults

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.ttft_ms, self.itl_ms, self.percentile)

    def arm(self, name: str) -> Arm | None:
        """Return the arm of that name; None for an endpoint that runs elsewhere."""
        return None if name in self.endpoints else parse_arm(name)


class Folder:
    """Folder of one comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, parent: Path) -> "Folder":
        """Make a new folder with a name of the present time below ``parent``."""
        now = datetime.datetime.now(datetime.UTC)
        path = parent / f"goodput-{now:%Y%m%dT%H%M%S}"
        (path / PROBES_FOLDER).mkdir(parents=True)
        return cls(path)

    def begin(self, conditions: Conditions) -> list[ProbeResult]:
        """Write the conditions, or compare them with those of the run that is continued; returns its probes.

        Raises :class:`ConfigError` if they differ.
        """
        file = self.path / "conditions.json"
        if file.is_file():
            before = msgspec.json.decode(file.read_bytes(), type=Conditions)
            if before != conditions:
                names = [
                    name for name in before.__struct_fields__ if getattr(before, name) != getattr(conditions, name)
                ]
                raise ConfigError(
                    f"{self.path} was measured under other conditions ({', '.join(names)}): begin a new one"
                )
        file.write_bytes(msgspec.json.format(msgspec.json.encode(conditions)))
        return self.probes()

    def probes(self) -> list[ProbeResult]:
        """Return the kept probes in the order in which they ran."""
        files = sorted((self.path / PROBES_FOLDER).glob("*.json"))
        return [msgspec.json.decode(file.read_bytes(), type=ProbeResult) for file in files]

    def keep(self, number: int, probe: ProbeResult) -> None:
        """Write a probe's file, whole or not at all."""
        file = self.path / PROBES_FOLDER / f"{number:03d}.json"
        new = file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(probe))
        new.replace(file)


def verdict_of(conditions: Conditions, probes: Iterable[ProbeResult]) -> Verdict:
    """Return the verdict on the probes so far."""
    by_arm: dict[str, list[Probe]] = {}
    for probe in probes:
        by_arm.setdefault(probe.arm, []).append(Probe(probe.rate, probe.outcome))
    arms = {name: conditions.arm(name) for name in by_arm}
    return judge(arms, by_arm, conditions.objectives, conditions.seed)


def rows_of(conditions: Conditions, probes: Sequence[ProbeResult]) -> list[dict[str, Any]]:
    """Return the figures of each probe, with the names of :data:`COLUMNS`."""
    return [_row(conditions.objectives, probe) for probe in probes]


def _row(objectives: Objectives, probe: ProbeResult) -> dict[str, Any]:
    outcome, figures = probe.outcome, probe.figures
    judged = outcome.judged_ms(objectives)
    gaps = np.concatenate(outcome.gaps_ms) if outcome.gaps_ms else np.empty(0)
    finite = gaps[np.isfinite(gaps)]
    second = figures["second_token_ms"]
    values = (
        probe.arm,
        probe.rate,
        probe.offered_rate,
        outcome.pressure(objectives),
        judged["ttft_ms"],
        judged["itl_ms"],
        float(finite.max()) if len(finite) else None,
        second.get("p50"),
        second.get("p99"),
        figures["tpot_ms"].get("mean"),
        outcome.num_requests,
        outcome.num_failed,
        probe.num_kills,
        figures["cached_input_tokens"] / max(1, figures["input_tokens"]),
        *(probe.simulated.get(name) for name in SIMULATED.values()),
    )
    return {name: _plain(value) for name, value in zip(COLUMNS, values, strict=True)}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the probes' figures as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def summary_of(conditions: Conditions, verdict: Verdict, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the kept JSON holds."""
    return {
        "conditions": msgspec.to_builtins(conditions),
        "verdict": asdict(verdict),
        "probes": [dict(row) for row in rows],
    }
