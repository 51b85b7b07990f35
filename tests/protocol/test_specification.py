"""docs/concepts/handover.md against the code: states, their transitions, messages with their fields, time-outs.

Both lists are made here, one from the page's tables, one from the code; for the transitions the code is run.
"""

import inspect
import re
import types
import typing
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from core_driver import Worker
from recorded_transitions import MACHINES, Transitions, record_transitions
from splitserve.engine.stage import NEXT_STAGES, Stage
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.request import Party, Role

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "handover.md").read_text(encoding="utf-8")
Rows = list[dict[str, str]]


def section(title: str) -> str:
    """The text under the heading that contains ``title``, up to the next heading of any level."""
    match = re.search(rf"^##+ [^\n]*{re.escape(title)}[^\n]*\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"docs/concepts/handover.md has no section {title!r}"
    return match[1]


def table(text: str) -> Rows:
    """The rows of a section's first table, by column."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def states_of(machine: type[Enum]) -> Rows:
    return table(section(f"`{machine.__module__}.{machine.__name__}`"))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_states(machine: type[Enum]) -> None:
    assert [row["state"].strip("`") for row in states_of(machine)] == [state.value for state in machine]


def written_transitions() -> Transitions:
    return {
        machine.__name__: {(row["state"].strip("`"), to) for row in states_of(machine) for to in names(row["next"])}
        for machine in MACHINES
    }


@pytest.fixture(scope="module")
def seen() -> Transitions:
    return record_transitions(written_transitions())


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_transitions(machine: type[Enum], seen: Transitions) -> None:
    """The page allows exactly the transitions that production code makes under faults."""
    assert written_transitions()[machine.__name__] == seen[machine.__name__]


@pytest.mark.slow
def test_no_schedule_makes_another_transition() -> None:
    assert record_transitions() == written_transitions()


def test_stages_are_those_of_the_table_in_the_code(seen: Transitions) -> None:
    allowed = {(stage.value, after.value) for stage, stages in NEXT_STAGES.items() for after in stages}
    assert allowed == seen[Stage.__name__]


def test_messages_and_their_fields() -> None:
    written = {row["message"].strip("`"): names(row["fields"]) for row in table(section("Messages"))}
    assert written == {kind.__name__: set(kind.__struct_fields__) for kind in typing.get_args(Body)}


def parts_of(kind: type[msgspec.Struct], found: dict[str, set[str]]) -> None:
    """Structs that ``kind`` is made of, with their fields."""
    hints = typing.get_type_hints(kind)
    pending = list(hints.values())
    while pending:
        hint = pending.pop()
        pending += typing.get_args(hint)
        is_struct = (
            inspect.isclass(hint) and not isinstance(hint, types.GenericAlias) and issubclass(hint, msgspec.Struct)
        )
        if is_struct and hint.__name__ not in found:
            found[hint.__name__] = set(hint.__struct_fields__)
            parts_of(hint, found)


def test_parts_of_messages() -> None:
    found: dict[str, set[str]] = {}
    for kind in (Envelope, *typing.get_args(Body)):
        parts_of(kind, found)
    for kind in typing.get_args(Body):
        found.pop(kind.__name__, None)
    found |= {"Envelope": set(Envelope.__struct_fields__)}
    written = {row["part"].strip("`"): names(row["fields"]) for row in table(section("Parts of messages"))}
    assert written == found


@pytest.mark.parametrize("role", list(Role))
def test_workers_handle_what_is_sent_to_them(role: Role) -> None:
    """And nothing else. Answers of membership are the loop's; every worker has both sides of a hand-over."""
    core = Worker(role, Party("worker", 1)).core
    receivers = {"prefill", "decode", "decode or mixed"}
    written = {
        row["message"].strip("`")
        for row in table(section("Messages"))
        for sender, to in [row["from, to"].split(", ")]
        if to in receivers or (to == "worker" and sender != "membership")
    }
    assert written == {kind.__name__ for kind in core._handlers}


def test_time_outs_and_bounds() -> None:
    written = {row["setting"].strip("`"): float(row["default"]) for row in table(section("Time-outs"))}
    assert written == msgspec.structs.asdict(ProtocolConfig())
