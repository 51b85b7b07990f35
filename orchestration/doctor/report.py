"""Findings of the doctor, as lines for people and as JSON for programs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_WIDTH = 15


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem found by a check."""

    name: str  # for programs, like ``wrong_transport``
    text: str
    advice: str  # the remedy


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    text: str  # the facts; with ``skipped``, the reason
    problems: tuple[Problem, ...] = ()
    skipped: bool = False

    @property
    def status(self) -> str:
        return "problem" if self.problems else "skipped" if self.skipped else "ok"

    def lines(self) -> Iterator[str]:
        yield f"{self.status.ljust(8)} {self.name.ljust(_WIDTH)} {self.text}".rstrip()
        for problem in self.problems:
            yield f"{'':8} - {problem.name}: {problem.text}"
            yield f"{'':8}   what to do: {problem.advice}"

    def as_json(self) -> dict[str, Any]:
        problems = [{"name": each.name, "text": each.text, "advice": each.advice} for each in self.problems]
        return {"name": self.name, "status": self.status, "text": self.text, "problems": problems}


def check(name: str, text: str, problems: Iterable[Problem] = ()) -> Check:
    return Check(name, text, tuple(problems))


def skipped(name: str, why: str) -> Check:
    return Check(name, why, skipped=True)


@dataclass(slots=True)
class Diagnosis:
    """All checks of one target."""

    version: str
    target: str  # a URL, or this machine
    checks: list[Check] = field(default_factory=list)
    probe: dict[str, Any] | None = None  # result of the request through the real path; None: none was sent

    @property
    def problems(self) -> list[Problem]:
        return [problem for each in self.checks for problem in each.problems]

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "target": self.target,
            "healthy": not self.problems,
            "problems": [problem.name for problem in self.problems],
            "checks": [each.as_json() for each in self.checks],
            "probe": self.probe,
        }

    def summary(self) -> str:
        if not self.problems:
            return f"Nothing is wrong with {self.target}."
        number = len(self.problems)
        return f"{number} problem{'' if number == 1 else 's'} with {self.target}."


def few(names: Sequence[str]) -> str:
    """Join the first three names and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
