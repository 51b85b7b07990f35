"""Schedulers and prefix reuse, as pure functions over blocks and sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduled_sequences import (
    BLOCK_SIZE,
    complete,
    lengths,
    make_blocks,
    make_computed,
    make_decode,
    make_prefill,
    make_sequence,
    plan,
)
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import Planned, StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.prefill.scheduler import TAIL_SPLIT_FACTOR


class TestPrefill:
    def test_a_short_prompt_is_one_chunk_that_draws_a_token(self) -> None:
        blocks = make_blocks()
        scheduler = make_prefill(blocks, max_num_seqs=4)
        sequence = make_sequence("a", 6)
        scheduler.add(sequence)
        ((_, chunk),) = scheduler.plan(16)
        assert (list(chunk.token_ids), chunk.start) == (sequence.token_ids, 0)
        assert list(chunk.block_ids) == sequence.block_ids and len(sequence.block_ids) == 2
        assert chunk.sample is not None and chunk.sample.position == 6

    def test_chunks_end_on_block_edges_and_only_the_last_draws(self) -> None:
        blocks = make_blocks()
        scheduler = make_prefill(blocks, max_num_seqs=4)
        scheduler.add(make_sequence("a", 21))
        sizes, samples = [], []
        while planned := scheduler.plan(10):
            complete(blocks, planned)
            sizes += [size for _, size in lengths(planned)]
            samples += [chunk.sample for _, chunk in planned]
        assert sizes == [8, 8, 5]
        assert [sample is not None for sample in samples] == [False, False, True]

    def test_a_budget_below_a_block_still_makes_progress(self) -> None:
        blocks = make_blocks()
        scheduler = make_prefill(blocks, max_num_seqs=4)
        scheduler.add(make_sequence("a", 7))
        sizes = []
        while planned := scheduler.plan(3):
            complete(blocks, planned)
            sizes += [size for _, size in lengths(planned)]
        assert sum(sizes) == 7 and max(sizes) <= 3

    def test_the_budget_is_shared_in_order(self) -> None:
        blocks = make_blocks()
        scheduler = make_prefill(blocks, max_num_seqs=4)
        for name, size in (("a", 6), ("b", 20), ("c", 5)):
            scheduler.add(make_sequence(name, size))
        planned = scheduler.plan(16)
        assert lengths(planned) == [("a", 6), ("b", 8), ("c", 2)]
        complete(blocks, planned)
        scheduler.remove(planned[0].sequence)
        assert lengths(scheduler.plan(16))[0] == ("b", 12)

    def test_the_tail_chunk_is_small_where_the_prompt_is_long(self) -> None:
        tail = 8
        blocks = make_blocks()
        scheduler = make_prefill(blocks, max_num_seqs=4, tail_chunk_tokens=tail)
        long, short = TAIL_SPLIT_FACTOR * tail + 2, TAIL_SPLIT_FACTOR * tail - 1
        for size, expected in ((long, [24, 10]), (short, [short])):
            scheduler.add(make_sequence(f"p{size}", size))
            sizes = []
            while planned := scheduler.plan(1000):
                complete(blocks, planned)
                sizes += [number for _, number in lengths(planned)]
            assert sizes == expected
            scheduler.remove(scheduler.active[0])

    def test_admission_is_all_or_nothing_and_first_come_first_served(self) -> None:
        blocks = make_blocks(8)
        scheduler = make_prefill(blocks, max_num_seqs=8)
        big, huge, small = make_sequence("big", 20), make_sequence("huge", 16), make_sequence("small", 4)
        for sequence in (big, huge, small):
            scheduler.add(sequence)
        assert lengths(scheduler.plan(100)) == [("big", 20)], "nobody overtakes"
        assert (huge.block_ids, small.block_ids) == ([], [])
        assert blocks.pool.count(BlockState.REFERENCED) == 5
        scheduler.remove(big)
        blocks.give_back(big)
        assert lengths(scheduler.plan(100)) == [("huge", 16), ("small", 4)]

    def test_max_num_seqs_counts_those_that_decode(self) -> None:
        scheduler = make_prefill(make_blocks(), max_num_seqs=3)
        for name in "abc":
            scheduler.add(make_sequence(name, 4))
        assert lengths(scheduler.plan(100, num_running=2)) == [("a", 4)]

    def test_those_that_decode_keep_a_block_each_to_grow_into(self) -> None:
        scheduler = make_prefill(make_blocks(6), max_num_seqs=8)
        scheduler.add(make_sequence("a", 16))
        assert scheduler.plan(100, num_running=3) == []
        assert lengths(scheduler.plan(100, num_running=2)) == [("a", 16)]

    def test_removed_sequences_are_forgotten_wherever_they_are(self) -> None:
        scheduler = make_prefill(make_blocks(), max_num_seqs=1)
        active, waiting, stranger = (make_sequence(name, 4) for name in "abc")
        scheduler.add(active)
        scheduler.add(waiting)
        scheduler.plan(100)
        for sequence in (active, waiting, stranger):
            scheduler.remove(sequence)
        assert scheduler.plan(100) == []

    @given(
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
        budget=st.integers(1, 40),
        tail=st.sampled_from([0, 4, 8]),
        num_blocks=st.integers(16, 64),
    )
    @settings(max_examples=150)
    def test_every_prompt_is_computed_once_in_order_within_the_budget(
        self, sizes: list[int], budget: int, tail: int, num_blocks: int
    ) -> None:
        blocks = make_blocks(num_blocks)
        scheduler = make_prefill(blocks, max_num_seqs=3, tail_chunk_tokens=tail)
        sequences = [make_sequence(f"s{i}", size) for i, size in enumerate(sizes)]
        for sequence in sequences:
            scheduler.add(sequence)
        computed: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for _ in range(1000):
            planned = scheduler.plan(budget)
            if not planned:
                break
            assert 0 < sum(size for _, size in lengths(planned)) <= budget
            assert len(scheduler.active) <= 3
            for sequence, chunk in planned:
                assert chunk.start == len(computed[sequence])
                assert len(chunk.block_ids) * BLOCK_SIZE >= chunk.start + len(chunk.token_ids)
                computed[sequence] += chunk.token_ids
            complete(blocks, planned)
            for sequence, chunk in planned:
                if chunk.sample is not None:
                    scheduler.remove(sequence)
                    blocks.give_back(sequence)
            blocks.pool.check_invariants()
        assert [computed[sequence] for sequence in sequences] == [sequence.token_ids for sequence in sequences]
        assert blocks.pool.count(BlockState.REFERENCED) == 0


class TestDecode:
    def make(self, num_blocks: int = 64, max_num_seqs: int = 4) -> tuple[BlockManager, StepScheduler]:
        return make_decode(num_blocks, max_num_seqs)

    def start(self, blocks: BlockManager, scheduler: StepScheduler, name: str, num_prompt_tokens: int) -> Sequence:
        sequence = make_computed(blocks, name, num_prompt_tokens)
        scheduler.start_decoding(sequence)
        return sequence

    def decode(self, blocks: BlockManager, planned: list[Planned]) -> None:
        complete(blocks, planned)
        for sequence, chunk in planned:
            if chunk.sample is not None:
                sequence.token_ids.append(1)

    def test_each_running_sequence_gets_one_token_before_any_prefill(self) -> None:
        blocks, scheduler = self.make()
        self.start(blocks, scheduler, "a", 4)
        self.start(blocks, scheduler, "b", 6)
        scheduler.add(make_sequence("c", 30))
        planned = plan(scheduler, 10)
        assert lengths(planned) == [("a", 1), ("b", 1), ("c", 8)]
        assert all(chunk.sample is not None for _, chunk in planned[:2])

    def test_a_sequence_grows_by_a_block_when_it_needs_one_and_stays_adjacent(self) -> None:
        blocks, scheduler = self.make()
        sequence = self.start(blocks, scheduler, "a", 3)
        sizes = []
        for _ in range(8):
            self.decode(blocks, plan(scheduler, 4))
            sizes.append(len(sequence.block_ids))
        assert sizes == [1, 2, 2, 2, 2, 3, 3, 3]
        first = sequence.block_ids[0]
        assert sequence.block_ids == [first, first + 1, first + 2]

    def test_the_newest_is_preempted_and_computed_again_with_what_it_had_drawn(self) -> None:
        blocks, scheduler = self.make(num_blocks=5)
        old = self.start(blocks, scheduler, "old", 8)
        new = self.start(blocks, scheduler, "new", 8)
        plan(scheduler, 4)  # old takes the fifth block, nothing is left for new
        assert scheduler.decodes.counters.preemptions == 1
        assert list(scheduler.decodes.running) == [old] and list(scheduler.prompts.waiting) == [new]
        assert (new.block_ids, new.num_computed) == ([], 0)
        assert len(new.token_ids) == 9, "what was drawn stays"
        scheduler.remove(old)
        blocks.give_back(old)
        ((sequence, chunk),) = plan(scheduler, 100)
        assert sequence is new and chunk.start + len(chunk.token_ids) == 9
        assert chunk.start == 8, "its own blocks were still cached"
        assert chunk.sample is not None and chunk.sample.position == 9

    def test_it_comes_back_before_those_that_never_ran(self) -> None:
        blocks, scheduler = self.make(num_blocks=5)
        self.start(blocks, scheduler, "old", 8)
        new = self.start(blocks, scheduler, "new", 8)
        scheduler.add(make_sequence("later", 4))
        plan(scheduler, 4)
        assert scheduler.prompts.waiting[0] is new

    def test_a_sequence_alone_that_finds_no_block_preempts_itself(self) -> None:
        blocks, scheduler = self.make(num_blocks=4)
        other = blocks.pool.allocate(2)
        assert other is not None
        alone = self.start(blocks, scheduler, "alone", 8)
        assert plan(scheduler, 4) == []
        assert not scheduler.decodes.running and list(scheduler.prompts.waiting) == [alone]
        blocks.pool.release(other)
        assert lengths(plan(scheduler, 4)) == [("alone", 1)]

    @pytest.mark.parametrize(("max_num_seqs", "budget", "expected"), [(2, 10, 2), (4, 3, 3), (4, 10, 4)])
    def test_a_step_is_bounded_by_max_num_seqs_and_budget(self, max_num_seqs: int, budget: int, expected: int) -> None:
        blocks, scheduler = self.make(max_num_seqs=max_num_seqs)
        for name in "abcd":
            self.start(blocks, scheduler, name, 4)
        assert len(plan(scheduler, budget)) == expected

    @given(
        prompts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
        num_blocks=st.integers(6, 20),
        budget=st.integers(4, 16),
    )
    @settings(max_examples=100)
    def test_every_sequence_reaches_its_end_however_little_memory_there_is(
        self, prompts: list[int], num_blocks: int, budget: int
    ) -> None:
        blocks, scheduler = self.make(num_blocks=num_blocks)
        sequences = [make_sequence(f"s{i}", size) for i, size in enumerate(prompts)]
        for sequence in sequences:
            scheduler.add(sequence)
        wanted = 10
        for _ in range(2000):
            planned = plan(scheduler, budget)
            if not planned:
                break
            assert sum(size for _, size in lengths(planned)) <= budget
            self.decode(blocks, planned)
            for sequence, chunk in planned:
                if chunk.sample is None:
                    continue
                if sequence.num_output_tokens >= wanted:
                    scheduler.remove(sequence)
                    blocks.give_back(sequence)
                else:
                    scheduler.start_decoding(sequence)
            blocks.pool.check_invariants()
            assert blocks.pool.total_references() == sum(len(s.block_ids) for s in sequences)
        assert [sequence.num_output_tokens for sequence in sequences] == [wanted] * len(prompts)
        assert blocks.pool.count(BlockState.REFERENCED) == 0


class TestPrefixReuse:
    def test_a_known_prefix_is_shared_and_only_the_rest_is_computed(self) -> None:
        blocks = make_blocks()
        prefix = list(range(12))
        first, second = make_sequence("a", [*prefix, 90, 91]), make_sequence("b", [*prefix, 80])
        assert blocks.reserve(first)
        first.num_computed = 14
        blocks.publish_computed(first)
        assert blocks.reserve(second)
        assert second.block_ids[:3] == first.block_ids[:3]
        assert second.block_ids[3] not in first.block_ids
        assert (second.num_computed, second.num_cached_tokens) == (12, 12)
        blocks.give_back(first)
        assert blocks.pool.state(second.block_ids[0]) is BlockState.REFERENCED

    def test_the_last_token_is_always_computed(self) -> None:
        blocks = make_blocks()
        prompt = list(range(8))
        first, second = make_sequence("a", prompt), make_sequence("b", prompt)
        assert blocks.reserve(first)
        first.num_computed = 8
        blocks.publish_computed(first)
        assert blocks.reserve(second)
        assert second.num_computed == 4 and second.num_remaining == 4
        assert second.block_ids[1] != first.block_ids[1]

    def test_what_is_not_computed_yet_is_not_found(self) -> None:
        blocks = make_blocks()
        first, second = make_sequence("a", list(range(12))), make_sequence("b", list(range(12)))
        assert blocks.reserve(first)
        first.num_computed = 7
        blocks.publish_computed(first)
        assert blocks.reserve(second)
        assert second.num_computed == 4, "one block is full, the next isn't"

    def test_a_block_matches_only_after_the_same_beginning(self) -> None:
        blocks = make_blocks()
        first = make_sequence("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        second = make_sequence("b", [0, 2, 3, 4, 5, 6, 7, 8, 9])
        assert blocks.reserve(first)
        first.num_computed = 9
        blocks.publish_computed(first)
        assert blocks.reserve(second)
        assert second.num_computed == 0

    def test_cached_blocks_that_nobody_holds_count_once(self) -> None:
        """Referencing a cached block takes it from what can be allocated: a reservation must reckon with both."""
        blocks = make_blocks(4)
        first = make_sequence("a", list(range(9)))
        assert blocks.reserve(first)
        first.num_computed = 9
        blocks.publish_computed(first)
        blocks.give_back(first)
        too_long = make_sequence("b", [*range(8), *range(50, 60)])  # two cached, three fresh, of four in all
        assert not blocks.reserve(too_long)
        assert too_long.block_ids == [] and blocks.pool.total_references() == 0
        fitting = make_sequence("c", [*range(8), *range(50, 58)])
        assert blocks.reserve(fitting) and fitting.num_computed == 8

    def test_the_hit_for_usage_is_that_of_the_first_admission(self) -> None:
        blocks = make_blocks()
        sequence = make_sequence("a", 9)
        assert blocks.reserve(sequence)
        sequence.num_computed = 9
        blocks.publish_computed(sequence)
        blocks.give_back(sequence)
        assert blocks.reserve(sequence)
        assert (sequence.num_computed, sequence.num_cached_tokens) == (8, 0)
