"""Steps of every worker: sequences that decode come first, prompts take the rest of the budget.

The two policies, of prompts and of decoding sequences, are independent of each other. No torch, no clock.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from splitserve.engine.block_manager import Shortage
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.protocol.counters import WorkerCounters
from splitserve.protocol.placement.chunk_bounds import ChunkBounds
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.step import ScheduledChunk

MAX_LOADS_AHEAD = 8
"""The first sequences that wait: those that may have their KV onboarded or read from a peer, and hold blocks for it."""


class Planned(NamedTuple):
    sequence: Sequence
    chunk: ScheduledChunk


@dataclass(slots=True)
class StepBudget:
    """Bounds of a worker's steps. The role of a worker is what these numbers make of it."""

    max_num_batched_tokens: int  # tokens of a step
    max_num_seqs: int  # sequences of a step
    beside_decode: ChunkBounds  # prompt tokens of a step that also decodes
    tail_chunk_tokens: int = 0  # last chunk of a long prompt, so that little is left to move after it; 0: no bound
    draws_second_tokens: bool = False  # of prompts that are handed over, where no other prompt waits
    max_prompts_beside_decode: int = 0  # of a step that also decodes: more have no CUDA graph; 0: no bound


class PromptPolicy(Protocol):
    """Sequences with known tokens to compute: those that wait for their turn, and those that had it."""

    waiting: deque[Sequence]
    active: list[Sequence]

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Queue a sequence before all others, or in the order of arrival."""

    def add_admitted(self, sequence: Sequence) -> None:
        """Add a sequence that holds all its blocks, and has KV for some of its known tokens."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence. Its blocks stay with the caller. No effect on one that isn't here."""

    def take_prefilled(self) -> list[Sequence]:
        """Forget, and return, the sequences that decode here next: a launched step draws their first token."""

    def begin_loads(self, num_running: int) -> None:
        """Onboard KV of the first ones that wait from the tiers."""

    def shortage(self, budget: int, num_running: int) -> Shortage:
        """Return what the first one that waits lacks, if nothing but blocks keeps it from beginning."""

    def plan(self, budget: int, num_running: int) -> list[Planned]:
        """Return chunks of at most ``budget`` tokens, beside ``num_running`` sequences that decode."""


class DecodePolicy(Protocol):
    """Sequences that draw a token in each step. It counts preemptions in ``counters``."""

    running: dict[Sequence, None]
    counters: WorkerCounters

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences with KV for all known tokens but the last, or with the step launched that computes it."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence. Its blocks stay with the caller."""

    def plan(self, budget: int) -> list[Planned]:
        """Return a chunk of one token for each of at most ``budget`` sequences."""

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that lost their blocks since the last call, last the one that is to begin first."""


class StepScheduler:
    """Joins the two policies under one budget. ``step_model`` predicts the worker's steps; who sees them keeps it up to
    date."""

    def __init__(self, prompts: PromptPolicy, decodes: DecodePolicy, budget: StepBudget) -> None:
        self.prompts = prompts
        self.decodes = decodes
        self.budget = budget
        self.step_model = StepModel()
        self._has_newcomer = False  # a sequence that was handed over has joined those that decode since the last plan
        self._gave_way = False  # that was so at the last plan, and is not to count twice in a row

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Queue a sequence whose known tokens have yet to be computed here."""
        self.prompts.add(sequence, first=first)

    def add_admitted(self, sequence: Sequence) -> None:
        """Add a sequence that holds all its blocks, and has KV for some of its known tokens."""
        self.prompts.add_admitted(sequence)

    def start_decoding(self, sequence: Sequence, *, handed_over: bool = False) -> None:
        """Let a sequence draw a token in each step from now on. No effect on one that does. One that was
        ``handed_over`` got its first token elsewhere, and has waited for its KV and for the step in flight since."""
        if sequence not in self.decodes.running:
            assert sequence.num_remaining == 1, f"{sequence.key}, which is to decode, isn't computed"
            self.prompts.remove(sequence)
            self.decodes.add([sequence])
            self._has_newcomer |= handed_over

    def requeue(self, sequence: Sequence) -> None:
        """Let a sequence that gave its blocks back start anew, before all others."""
        self.remove(sequence)
        self.add(sequence, first=True)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with the caller."""
        if sequence in self.decodes.running:
            self.decodes.remove(sequence)
        else:
            self.prompts.remove(sequence)

    @property
    def num_running(self) -> int:
        return len(self.decodes.running)

    @property
    def owes_blocks(self) -> bool:
        """Return whether the next one to begin lost its blocks: newcomers would keep it from getting them back."""
        waiting = self.prompts.waiting
        return bool(waiting) and waiting[0].was_admitted and not waiting[0].block_ids

    def begin_loads(self) -> None:
        """Onboard KV of the first ones that wait from the tiers."""
        self.prompts.begin_loads(self.num_running)

    def shortage(self) -> Shortage:
        """Return what the first one that waits lacks, if nothing but blocks keeps it from beginning."""
        return self.prompts.shortage(self.budget.max_num_batched_tokens - self.num_running, self.num_running)

    def plan(self, arriving: Collection[Sequence] = ()) -> list[Planned]:
        """Return the chunks of one step; an empty list if nothing can run.

        Those ``arriving`` decode as soon as their KV is here: they bound prompts as if they decoded, since they would
        have to wait for the step.
        A sequence whose first token a launched step draws joins those that decode, so that it misses no step.
        """
        self.decodes.add(self.prompts.take_prefilled())
        left = self.budget.max_num_batched_tokens
        planned = self.decodes.plan(min(self.budget.max_num_seqs, left))
        for preempted in self.decodes.take_preempted():
            self.prompts.add(preempted, first=True)
        left -= len(planned)
        self._gave_way = bool(planned) and self._has_newcomer and not self._gave_way
        self._has_newcomer = False
        left = min(left, self._prompt_tokens_beside(planned, arriving))
        planned += self.prompts.plan(left, self.num_running)
        return planned

    def _prompt_tokens_beside(self, decodes: list[Planned], arriving: Collection[Sequence]) -> int:
        """Return the most prompt tokens of a step with ``decodes``. The strictest objective counts. Without one prompts
        give way to a sequence that was just handed over, but not twice in a row."""
        bounds = self.budget.beside_decode
        sequences = itertools.chain((sequence for sequence, _ in decodes), arriving)
        objectives = [sequence.itl_seconds for sequence in sequences if sequence.itl_seconds]
        prompt = next(itertools.chain(self.prompts.active, self.prompts.waiting), None)
        if not objectives and self._gave_way:
            return 0
        if not objectives or prompt is None:
            return bounds.fixed if decodes or arriving else self.budget.max_num_batched_tokens
        context = sum([chunk.start + 1 for _, chunk in decodes])
        step = self.step_model.decode_seconds(len(decodes), context)
        return bounds.tokens(self.step_model, step, prompt.num_launched, min(objectives))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each sequence is in the one queue that its stage names."""
        queues = (
            (Stage.QUEUED, self.prompts.waiting),
            (Stage.PREFILLING, self.prompts.active),
            (Stage.DECODING, self.decodes.running),
        )
        for stage, sequences in queues:
            strays = [str(sequence.key) for sequence in sequences if sequence.stage is not stage]
            assert not strays, f"the scheduler has {strays} among those that are {stage.value}"
            assert len(set(sequences)) == len(sequences), f"a sequence is twice among those that are {stage.value}"
