"""``splitserve bench compare``: two runs of ``bench goodput``, arm by arm: ratios, intervals, regressions.

A and B are folders of runs. For each arm that both have, the ratio of B's goodput to A's has an interval from resampled
probes; a change is clear if the interval excludes 1, and the probes tell which goodput is higher: they may not where
one is only bounded ("at least", "less than"). Runs under other conditions are compared, too, and the conditions that
differ are listed: the ratio then shows their effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.goodput.estimate import (
    Goodput,
    Interval,
    Probe,
    interval,
    is_order_known,
    measured_goodput,
    resampled_goodputs,
)
from splitserve.benchmarks.goodput.probe import ProbeResult
from splitserve.benchmarks.goodput.result import Conditions, Folder
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.command_parser import CommandParser


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one arm's goodput from A to B."""

    arm: str
    before: Goodput
    after: Goodput
    ratio: float
    interval: Interval

    @property
    def is_known(self) -> bool:
        """Return whether the probes tell which of the two is more."""
        return is_order_known(self.before.extent, self.after.extent)

    @property
    def words(self) -> str:
        if not self.is_known:
            return "the probes don't tell"
        if self.interval.low > 1:
            return "better"
        return "regression" if self.interval.high < 1 else "no clear change"


def main(argv: Sequence[str]) -> int:
    """Compare two runs; exit status 1 if an arm's goodput is clearly lower in B. Raises :class:`ConfigError`."""
    parser = CommandParser(prog="splitserve bench compare", description=__doc__.partition("\n\n")[2])
    parser.add_argument("before", metavar="A", help="folder of a run")
    parser.add_argument("after", metavar="B", help="folder of the other run")
    add_result_options(parser)
    options = parser.parse_args(list(argv))
    (first, before), (second, after) = read_run(options.before), read_run(options.after)
    different = [name for name in first.__struct_fields__ if getattr(first, name) != getattr(second, name)]
    for name in different:
        print(f"{name}: {getattr(first, name)} in A, {getattr(second, name)} in B")
    changes = compare(first, before, after)
    rows = [
        [each.arm, each.before.bound, each.after.bound, f"{each.ratio:.2f}", each.interval.words, each.words]
        for each in changes
    ]
    print(table(rows, ("goodput, requests/s", "A", "B", "B / A", "90% interval", "")))
    data = {"different": different, "changes": [msgspec.to_builtins(each) | {"words": each.words} for each in changes]}
    keep_result("compare", argv, data, options)
    return 1 if any(each.words == "regression" for each in changes) else 0


def read_run(path: str) -> tuple[Conditions, list[ProbeResult]]:
    """Read a run's folder. Raises :class:`ConfigError` if it is none, or has no probes."""
    folder = Folder(Path(path))
    try:
        conditions = msgspec.json.decode((folder.path / "conditions.json").read_bytes(), type=Conditions)
        probes = folder.probes()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no folder of `splitserve bench goodput`: {error}") from error
    if not probes:
        raise ConfigError(f"{path} has no probes: its run was interrupted before the first one")
    return conditions, probes


def compare(conditions: Conditions, before: Sequence[ProbeResult], after: Sequence[ProbeResult]) -> list[Change]:
    """Return the change of each arm that both runs have. Both are judged by the objectives of ``conditions``.

    Raises :class:`ConfigError` if they have no arm in common.
    """
    objectives = conditions.objectives
    first, second = _by_arm(before), _by_arm(after)
    common = [arm for arm in first if arm in second]
    if not common:
        raise ConfigError(f"the runs have no arm in common: {', '.join(first)} in A, {', '.join(second)} in B")
    one = resampled_goodputs({arm: first[arm] for arm in common}, objectives, seed=1)
    other = resampled_goodputs({arm: second[arm] for arm in common}, objectives, seed=2)
    changes = []
    for arm in common:
        found, changed = (measured_goodput(probes[arm], objectives) for probes in (first, second))
        ratios = other[arm] / np.maximum(one[arm], 1e-9)
        changes.append(Change(arm, found, changed, changed.rate / max(found.rate, 1e-9), interval(ratios)))
    return changes


def _by_arm(probes: Sequence[ProbeResult]) -> Mapping[str, list[Probe]]:
    found: dict[str, list[Probe]] = {}
    for probe in probes:
        found.setdefault(probe.arm, []).append(Probe(probe.rate, probe.outcome))
    return found
