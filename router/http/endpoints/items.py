"""Parts of a message in order, as runs of one kind: the items of a response, the blocks of a message."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from splitserve.router.output.parts import Part, PartKind


@dataclass(slots=True)
class Run:
    """Neighbouring parts of one kind; a tool call is a run of its own."""

    index: int  # in the answer
    kind: PartKind  # CONTENT, REASONING or CALL
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of the text, in order

    @property
    def text(self) -> str:
        """Return the text so far; of a call: its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class RunOpened:
    run: Run


@dataclass(frozen=True, slots=True)
class RunGrew:
    run: Run
    text: str  # the addition


@dataclass(frozen=True, slots=True)
class RunClosed:
    run: Run


Step = RunOpened | RunGrew | RunClosed


class Runs:
    """The runs of one answer; :meth:`push` returns what changes, in order."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._by_call: dict[int, Run] = {}
        self._open: Run | None = None

    def push(self, parts: Iterable[Part]) -> list[Step]:
        """Add the next parts. Arguments of a call close with it; parts of another kind close what is open."""
        steps: list[Step] = []
        for part in parts:
            if part.kind is PartKind.ARGUMENTS:
                run = self._by_call[part.index]
            elif part.kind is PartKind.CALL:
                run = self._begin(steps, Run(len(self.runs), part.kind, part.call_id, part.name))
                self._by_call[part.index] = run
            elif self._open is not None and self._open.kind is part.kind:
                run = self._open
            else:
                run = self._begin(steps, Run(len(self.runs), part.kind))
            if part.text:
                run.pieces.append(part.text)
                steps.append(RunGrew(run, part.text))
        return steps

    def close(self) -> list[Step]:
        """End the answer."""
        steps: list[Step] = []
        self._close_open(steps)
        return steps

    def _begin(self, steps: list[Step], run: Run) -> Run:
        self._close_open(steps)
        self.runs.append(run)
        self._open = run
        steps.append(RunOpened(run))
        return run

    def _close_open(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(RunClosed(self._open))
            self._open = None


def runs_of(parts: Iterable[Part]) -> list[Run]:
    """Return the runs of a whole answer."""
    runs = Runs()
    runs.push(parts)
    return runs.runs
