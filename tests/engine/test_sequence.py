"""A sequence's stages: transitions that aren't in the table, and states that can't be, are noticed."""

from typing import Any

import msgspec
import pytest

from core_driver import DECODE, PREFILL, Worker, decode_request, grant, prefill_request
from planted import Plant
from scheduled_sequences import BLOCK_SIZE, make_sequence
from splitserve.decode.sink import SinkSide
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import NEXT_STAGES, Stage
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.source import SourcePart
from splitserve.protocol.request import Role
from splitserve.simulation.model import ROUTER


def test_each_stage_leads_to_the_end_and_none_leaves_it() -> None:
    assert NEXT_STAGES.keys() == set(Stage)
    reached = {Stage.RELEASED}
    for _ in Stage:
        reached |= {stage for stage, following in NEXT_STAGES.items() if following & reached}
    assert reached == set(Stage)
    assert not NEXT_STAGES[Stage.RELEASED]


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    sequence = make_sequence("a", 5)
    sequence.enter(Stage.QUEUED)
    sequence.enter(Stage.QUEUED)  # no transition
    with pytest.raises(AssertionError, match="goes from queued to decoding"):
        sequence.enter(Stage.DECODING)


def in_stage(stage: Stage, **fields: Any) -> Sequence:
    sequence = make_sequence("a", 6, decodes_here=stage is not Stage.OFFERED)
    sequence.stage = stage
    for name, value in fields.items():
        setattr(sequence, name, value)
    return sequence


TWO = [3, 4]  # blocks, enough for six tokens


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (Stage.UNGRANTED, {}),
        (Stage.UNADMITTED, {}),
        (Stage.PULLING, {"block_ids": TWO, "num_computed": 4}),
        (Stage.QUEUED, {"block_ids": TWO}),
        (Stage.QUEUED, {}),
        (Stage.PREFILLING, {"block_ids": TWO, "num_computed": 4}),
        (Stage.DECODING, {"block_ids": TWO, "num_computed": 5}),
        (Stage.OFFERED, {"block_ids": [3], "host_slots": [1], "num_computed": 6}),
        (Stage.ENDED, {"block_ids": TWO, "num_computed": 6}),
        (Stage.RELEASED, {}),
    ],
)
def test_states_that_can_be(stage: Stage, fields: dict[str, Any]) -> None:
    in_stage(stage, **fields).check_invariants(BLOCK_SIZE)


@pytest.mark.parametrize(
    ("stage", "fields", "words"),
    [
        (Stage.UNGRANTED, {"block_ids": TWO}, "holds 2 blocks"),
        (Stage.UNADMITTED, {"num_computed": 4}, "has KV without blocks"),
        (Stage.PULLING, {"block_ids": [3]}, "holds 1 blocks of 2"),
        (Stage.QUEUED, {"num_computed": 4}, "has KV without blocks"),
        (Stage.PREFILLING, {"block_ids": TWO, "num_computed": 6}, "has nothing to compute"),
        (Stage.PREFILLING, {"block_ids": TWO, "num_computed": 7}, "has KV for more tokens than it has"),
        (Stage.PREFILLING, {"block_ids": TWO, "host_slots": [1]}, "holds slots of the host tier"),
        (Stage.DECODING, {"block_ids": TWO, "num_computed": 4}, "has 2 tokens to compute"),
        (Stage.DECODING, {"block_ids": TWO, "num_computed": 5, "decodes_here": False}, "was to be handed out"),
        (Stage.OFFERED, {"block_ids": TWO, "num_computed": 5}, "isn't computed"),
        (Stage.RELEASED, {"block_ids": TWO}, "holds blocks that nothing touches"),
    ],
)
def test_states_that_cannot_be(stage: Stage, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        in_stage(stage, **fields).check_invariants(BLOCK_SIZE)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({"num_steps": 3, "num_tokens": 3}, "3 steps in flight"),
        ({"num_steps": 2, "num_tokens": 1}, "1 tokens in 2 steps"),
        ({"num_tokens": 2}, "chunks without a step"),
        ({"drawing_chunk": 0}, "chunks without a step"),
        ({"num_steps": 2, "num_tokens": 2, "is_gated": True}, "a gated step isn't the only one"),
    ],
)
def test_launched_steps_that_cannot_be(steps: dict[str, Any], words: str) -> None:
    sequence = in_stage(Stage.PREFILLING, block_ids=TWO)
    for name, value in steps.items():
        setattr(sequence.launched, name, value)
    with pytest.raises(AssertionError, match=words):
        sequence.check_invariants(BLOCK_SIZE)


def test_the_three_lengths_of_a_sequence_that_runs_ahead() -> None:
    """Two steps are launched: the first computes the prompt's last token, the second the token that the first draws."""
    sequence = in_stage(Stage.DECODING, block_ids=[3, 4, 5], num_computed=5)
    assert (sequence.num_computed, sequence.num_launched, sequence.num_proposed) == (5, 5, 6)
    for num_launched in (6, 7):
        chunk = sequence.chunk(1, BLOCK_SIZE)
        assert chunk.sample is not None and chunk.sample.position == num_launched
        sequence.on_launched(chunk, 0)
        assert (sequence.num_computed, sequence.num_launched, sequence.num_proposed) == (5, num_launched, 7)
        sequence.check_invariants(BLOCK_SIZE)


def test_a_temperature_that_would_make_logits_infinite_is_greedy() -> None:
    for given, drawn in ((1e-308, 0.0), (0.8, 0.8)):
        sequence = in_stage(Stage.DECODING, block_ids=TWO, num_computed=5)
        sequence.sampling = msgspec.structs.replace(sequence.sampling, temperature=given)
        sample = sequence.chunk(1, BLOCK_SIZE).sample
        assert sample is not None and sample.temperature == drawn


def test_no_step_is_launched_beyond_what_is_proposed() -> None:
    sequence = in_stage(Stage.DECODING, block_ids=TWO, num_computed=5)
    sequence.launched.num_steps, sequence.launched.num_tokens = 2, 2
    with pytest.raises(AssertionError, match=r"committed, launched, proposed lengths \(5, 7, 6\)"):
        sequence.check_invariants(BLOCK_SIZE)


def test_a_queued_sequence_is_in_no_step() -> None:
    sequence = in_stage(Stage.QUEUED, block_ids=TWO)
    sequence.launched.num_steps = sequence.launched.num_tokens = 1
    with pytest.raises(AssertionError, match="is in a step"):
        sequence.check_invariants(BLOCK_SIZE)


# ---- bugs planted in what moves sequences ----


def admitted_in_silence(patch: pytest.MonkeyPatch) -> None:
    """The sink reserves room, and the stage isn't changed."""
    original = SinkSide.admit

    def admit(self: SinkSide, headroom: int, slots: int, now: float) -> None:
        waiting = [incoming.sequence for incoming in self._waiting]
        original(self, headroom, slots, now)
        for sequence in waiting:
            sequence.stage = Stage.UNADMITTED

    patch.setattr(SinkSide, "admit", admit)


def granted_and_not_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillScheduler, "add", lambda self, sequence, first=False: self.waiting.append(sequence))


def offered_while_it_computes(patch: pytest.MonkeyPatch) -> None:
    """The first chunk counts as the last one."""
    original = SourcePart.on_computed

    def on_computed(self: SourcePart, sequence: Sequence, now: float) -> None:
        original(self, sequence, now)
        sequence.enter(Stage.OFFERED)

    patch.setattr(SourcePart, "on_computed", on_computed)


def pull(worker: Worker) -> None:
    worker.hear(ROUTER, decode_request())


def prefill(worker: Worker) -> None:
    worker.hear(ROUTER, prefill_request())
    worker.hear(DECODE, grant())
    plan = worker.plan()
    assert plan is not None
    worker.commit(plan)


@pytest.mark.parametrize(
    ("plant", "role", "drive", "words"),
    [
        (admitted_in_silence, Role.DECODE, pull, "is Stage.UNADMITTED, not Stage.PULLING"),
        (
            granted_and_not_queued,
            Role.PREFILL,
            prefill,
            "among those that are queued",
        ),
        (offered_while_it_computes, Role.PREFILL, prefill, "among those that are prefilling"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Plant, role: Role, drive: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(role, DECODE if role is Role.DECODE else PREFILL)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        drive(worker)


@pytest.mark.parametrize(("role", "drive"), [(Role.DECODE, pull), (Role.PREFILL, prefill)])
def test_without_a_planted_bug_nothing_is_found(role: Role, drive: Any) -> None:
    drive(Worker(role, DECODE if role is Role.DECODE else PREFILL))
