"""Steps with prompts and decode tokens, some launched before the results of those before them are here."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduled_sequences import BLOCK_SIZE, lengths, make_computed, make_decode, make_sequence, plan
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import Planned, StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.step import UNKNOWN_TOKEN


class Overlapped:
    """Steps as on a GPU: the next one is planned and launched before the results of the last one are here."""

    def __init__(self, blocks: BlockManager, scheduler: StepScheduler, budget: int) -> None:
        self.blocks = blocks
        self.scheduler = scheduler
        self.budget = budget
        self.in_flight: deque[list[Planned]] = deque()

    def launch(self) -> list[Planned]:
        planned = plan(self.scheduler, self.budget)
        for index, (sequence, chunk) in enumerate(planned):
            sequence.on_launched(chunk, index)
        if planned:
            self.in_flight.append(planned)
        return planned

    def commit(self) -> None:
        for sequence, chunk in self.in_flight.popleft():
            sequence.on_completed(chunk)
            if sequence.has_ended:
                self.give_back(sequence)
                continue
            sequence.num_computed += len(chunk.token_ids)
            self.blocks.publish_computed(sequence)
            if chunk.sample is None:
                continue
            assert chunk.sample.position == len(sequence.token_ids), "tokens are drawn in order, each once"
            sequence.token_ids.append(1)
            if sequence.num_output_tokens == sequence.sampling.max_tokens:
                sequence.enter(Stage.ENDED)
                self.scheduler.remove(sequence)
                self.give_back(sequence)
            else:
                self.scheduler.start_decoding(sequence)

    def receive(self, name: str, *, itl_seconds: float = 0.0) -> None:
        """Let a sequence decode that was handed over with its KV."""
        sequence = make_computed(self.blocks, name, 5, itl_seconds=itl_seconds)
        self.scheduler.start_decoding(sequence, handed_over=True)

    def prompt_tokens_of_next_step(self) -> int:
        """Launch a step, complete the one before it, and return the prompt tokens of the first."""
        planned = self.launch()
        while len(self.in_flight) > 1:
            self.commit()
        return sum(size for name, size in lengths(planned) if name == "prompt")

    def give_back(self, sequence: Sequence) -> None:
        if not sequence.launched.num_steps:
            self.blocks.give_back(sequence)


class TestMixedSteps:
    """Prompts beside sequences that decode."""

    def test_a_prompt_alone_goes_in_one_chunk_and_beside_decodes_in_small_ones(self) -> None:
        blocks, scheduler = make_decode(max_num_prefill_tokens=8)
        engine = Overlapped(blocks, scheduler, budget=64)
        for name, size in (("a", 40), ("b", 20)):
            scheduler.add(make_sequence(name, size))
            assert lengths(engine.launch())[-1] == (name, 40 if name == "a" else 8)
        assert lengths(engine.in_flight[-1]) == [("a", 1), ("b", 8)]
        engine.commit()
        assert lengths(engine.launch()) == [("a", 1), ("b", 8)]

    def test_the_bound_holds_for_all_prompts_together(self) -> None:
        blocks, scheduler = make_decode(max_num_prefill_tokens=8)
        engine = Overlapped(blocks, scheduler, budget=64)
        scheduler.add(make_sequence("a", 4))
        engine.launch()
        for name in "bcd":
            scheduler.add(make_sequence(name, 5))
        assert lengths(engine.launch()) == [("a", 1), ("b", 5), ("c", 3)]

    @pytest.mark.parametrize(
        ("objectives", "tokens"),
        [
            ([0.0], 8),
            ([10.0], 348),
            ([14.0, 0.0], 388),
            ([20.0, 14.0], 388),
            ([9.0] * 2, 320),
            ([100.0], 500),
            ([9.9], 340),
            ([3.0], 200),
        ],
    )
    def test_an_objective_for_gaps_sizes_the_prompts(self, objectives: list[float], tokens: int) -> None:
        """The strictest one counts; a sequence without one bounds nothing, but takes its part of the step. Prompts
        end on a block's edge, and get a share of the step in any case."""
        blocks, scheduler = make_decode(256, max_num_prefill_tokens=8, max_num_sized_tokens=500)
        scheduler.step_model = StepModel(base=2.0, per_decode=3.0, per_token=0.01, num_steps=1)
        engine = Overlapped(blocks, scheduler, budget=1000)
        for number, itl_seconds in enumerate(objectives):
            scheduler.add(make_sequence(str(number), 4, itl_seconds=itl_seconds))
        engine.launch()
        scheduler.add(make_sequence("prompt", 600))
        assert lengths(engine.launch())[-1] == ("prompt", tokens)

    @pytest.mark.parametrize(("itl_seconds", "beside"), [(0.0, [0, 8, 8]), (10.0, [8, 8, 8])])
    def test_prompts_give_way_to_what_was_handed_over(self, itl_seconds: float, beside: list[int]) -> None:
        """It has waited for the step in flight. With an objective for gaps that alone sizes the prompts."""
        engine = Overlapped(*make_decode(max_num_prefill_tokens=8, max_num_sized_tokens=8), budget=64)
        engine.scheduler.step_model = StepModel(base=2.0, per_token=0.01, num_steps=1)
        engine.scheduler.add(make_sequence("prompt", 40))
        engine.receive("a", itl_seconds=itl_seconds)
        found = [engine.prompt_tokens_of_next_step() for _ in beside]
        assert found == beside

    def test_they_give_way_in_every_second_step_at_most(self) -> None:
        engine = Overlapped(*make_decode(max_num_seqs=9, max_num_prefill_tokens=8), budget=64)
        engine.scheduler.add(make_sequence("prompt", 40))
        found = []
        for name in "abcdef":
            engine.receive(name)
            found.append(engine.prompt_tokens_of_next_step())
        assert found == [0, 8, 0, 8, 0, 8]

    def test_a_step_that_decodes_has_as_many_prompts_as_its_graph(self) -> None:
        """Without sequences that decode there is no bound: the prompts that were left out come first then."""
        blocks, scheduler = make_decode(max_num_seqs=8, max_prompts=2)
        engine = Overlapped(blocks, scheduler, budget=64)
        for name in "abc":
            scheduler.add(make_sequence(name, 5))
        assert lengths(engine.launch()) == [("a", 5), ("b", 5), ("c", 5)]
        for name in "defg":
            scheduler.add(make_sequence(name, 5))
        assert lengths(engine.launch())[3:] == [("d", 5), ("e", 5)]
        assert lengths(engine.launch())[5:] == [("f", 5), ("g", 5)]

    def test_a_sequence_is_in_the_step_after_the_one_that_draws_its_first_token(self) -> None:
        blocks, scheduler = make_decode()
        engine = Overlapped(blocks, scheduler, budget=64)
        for name in "ab":
            scheduler.add(make_sequence(name, 5))
        first, second = engine.launch(), engine.launch()
        assert lengths(first) == [("a", 5), ("b", 5)]
        for index, (_, chunk) in enumerate(second):
            assert (list(chunk.token_ids), chunk.start, chunk.previous_chunk) == ([UNKNOWN_TOKEN], 5, index)
            assert chunk.sample is not None and chunk.sample.position == 6
        assert [sequence for sequence, _ in second] == [sequence for sequence, _ in first]

    def test_what_is_handed_out_does_not_decode_here(self) -> None:
        blocks, scheduler = make_decode()
        engine = Overlapped(blocks, scheduler, budget=64)
        scheduler.add(make_sequence("a", 5, decodes_here=False))  # as prefill's side of a hand-over does
        assert lengths(engine.launch()) == [("a", 5)]
        assert engine.launch() == []

    def test_a_first_token_that_is_the_last_one_needs_no_further_step(self) -> None:
        blocks, scheduler = make_decode()
        engine = Overlapped(blocks, scheduler, budget=64)
        scheduler.add(make_sequence("a", 5, max_tokens=1))
        assert lengths(engine.launch()) == [("a", 5)]
        assert engine.launch() == []

    def test_an_end_in_flight_holds_no_prompt_back(self) -> None:
        """Nobody waits for a token of the next step, so a prompt gets all of it."""
        blocks, scheduler = make_decode(max_num_prefill_tokens=8)
        engine = Overlapped(blocks, scheduler, budget=64)
        scheduler.add(make_sequence("a", 5, max_tokens=2))
        engine.launch()
        assert lengths(engine.launch()) == [("a", 1)]
        engine.commit()
        scheduler.add(make_sequence("b", 40))
        assert lengths(engine.launch()) == [("b", 40)]

    @given(
        prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=8),
        num_blocks=st.integers(14, 40),
        budget=st.integers(4, 48),
        beside=st.integers(1, 48),
        depth=st.integers(1, 2),
        data=st.data(),
    )
    @settings(max_examples=300)
    def test_decodes_miss_no_step_prompts_make_progress_and_bounds_hold(
        self,
        prompts: list[tuple[int, int, int]],
        num_blocks: int,
        budget: int,
        beside: int,
        depth: int,
        data: st.DataObject,
    ) -> None:
        """``prompts``: length, max_tokens, the step at which it arrives. Blocks may run short."""
        blocks, scheduler = make_decode(num_blocks, max_num_seqs=4, max_num_prefill_tokens=beside)
        engine = Overlapped(blocks, scheduler, budget)
        sequences = [make_sequence(f"s{i}", size, max_tokens=most) for i, (size, most, _) in enumerate(prompts)]
        for step in range(3000):
            for sequence, (_, _, arrival) in zip(sequences, prompts, strict=True):
                if arrival == step:
                    scheduler.add(sequence)
            before = list(engine.in_flight[-1]) if engine.in_flight else []
            num_preemptions = scheduler.decodes.counters.preemptions
            planned = engine.launch()
            decoding = [entry for entry in planned if entry.sequence in scheduler.decodes.running]
            prefilling = planned[len(decoding) :]
            assert decoding == planned[: len(decoding)]
            left = min(budget - len(decoding), beside if decoding else budget)
            self.check_bounds(decoding, prefilling, left)
            self.check_edges(prefilling, left)
            if scheduler.decodes.counters.preemptions == num_preemptions and blocks.pool.num_available:
                self.check_nobody_left_out(before, planned)
            blocks.pool.check_invariants()
            if len(engine.in_flight) == depth or (engine.in_flight and (not planned or data.draw(st.booleans()))):
                engine.commit()
            if all(sequence.has_ended for sequence in sequences) and not engine.in_flight:
                break
        assert [s.num_output_tokens for s in sequences] == [most for _, most, _ in prompts], "somebody starved"
        assert blocks.pool.count(BlockState.REFERENCED) == 0

    def check_bounds(self, decoding: list[Planned], prefilling: list[Planned], left: int) -> None:
        assert all(len(chunk.token_ids) == 1 for _, chunk in decoding)
        assert sum(size for _, size in lengths(prefilling)) <= left
        for sequence, chunk in decoding + prefilling:
            known = sequence.token_ids[chunk.start : chunk.start + len(chunk.token_ids)]
            assert list(chunk.token_ids) == (known or [UNKNOWN_TOKEN])
            assert len(chunk.block_ids) * BLOCK_SIZE >= chunk.start + len(chunk.token_ids)

    def check_edges(self, prefilling: list[Planned], left: int) -> None:
        """A chunk that isn't the last ends on a block's edge, unless what was left of the step reaches none."""
        for _, chunk in prefilling:
            end = chunk.start + len(chunk.token_ids)
            to_edge = BLOCK_SIZE - chunk.start % BLOCK_SIZE
            assert chunk.sample is not None or end % BLOCK_SIZE == 0 or left < to_edge
            left -= len(chunk.token_ids)

    def check_nobody_left_out(self, before: list[Planned], planned: list[Planned]) -> None:
        """Whoever draws a token in the step before, and may go on, is in this one."""
        here = dict(planned)
        for index, (sequence, chunk) in enumerate(before):
            if chunk.sample is None or sequence.has_ended:
                continue
            if sequence.num_output_tokens + 1 < sequence.sampling.max_tokens:
                assert here[sequence].previous_chunk == index
            else:
                assert sequence not in here
