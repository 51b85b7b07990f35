"""Schedulers and prefix reuse, as pure functions over blocks and sequences."""

import zlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.decode.scheduler import DecodeScheduler
from splitserve.kvconnector.block_pool import BlockPool, BlockState
from splitserve.kvconnector.tiers import Tiers
from splitserve.prefill.scheduler import TAIL_SPLIT_FACTOR, Planned, PrefillScheduler
from splitserve.prefill.sequence import BlockManager, Sequence
from splitserve.request import Party, RequestKey, SamplingParams
from splitserve.step import UNKNOWN_TOKEN

BLOCK_SIZE = 4
ROUTER = Party("router", 1)


def make_blocks(num_blocks: int = 64) -> BlockManager:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    return BlockManager(pool, BLOCK_SIZE, b"root", Tiers(pool))


def make_sequence(name: str, tokens: int | list[int], *, num_output: int = 0, max_tokens: int = 100) -> Sequence:
    """Distinct tokens by name, so that no two share a prefix by chance."""
    token_ids = (
        [zlib.crc32(f"{name} {i}".encode()) % 10_000 for i in range(tokens)]
        if isinstance(tokens, int)
        else list(tokens)
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(RequestKey(name), ROUTER, token_ids, len(token_ids) - num_output, sampling, deadline=100.0)


def complete(blocks: BlockManager, planned: list[Planned]) -> None:
    """What the core does with a step's results, but for drawing tokens."""
    for sequence, chunk in planned:
        sequence.num_computed += len(chunk.token_ids)
        blocks.publish_computed(sequence)


def lengths(planned: list[Planned]) -> list[tuple[str, int]]:
    return [(sequence.key.request_id, len(chunk.token_ids)) for sequence, chunk in planned]


class TestPrefill:
    def test_a_short_prompt_is_one_chunk_that_draws_a_token(self) -> None:
        blocks = make_blocks()
        scheduler = PrefillScheduler(blocks, max_num_seqs=4)
        sequence = make_sequence("a", 6)
        scheduler.add(sequence)
        ((_, chunk),) = scheduler.plan(16)
        assert (list(chunk.token_ids), chunk.start) == (sequence.token_ids, 0)
        assert list(chunk.block_ids) == sequence.block_ids and len(sequence.block_ids) == 2
        assert chunk.sample is not None and chunk.sample.position == 6

    def test_chunks_end_on_block_edges_and_only_the_last_draws(self) -> None:
        blocks = make_blocks()
        scheduler = PrefillScheduler(blocks, max_num_seqs=4)
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
        scheduler = PrefillScheduler(blocks, max_num_seqs=4)
        scheduler.add(make_sequence("a", 7))
        sizes = []
        while planned := scheduler.plan(3):
            complete(blocks, planned)
            sizes += [size for _, size in lengths(planned)]
        assert sum(sizes) == 7 and max(sizes) <= 3

    def test_the_budget_is_shared_in_order(self) -> None:
        blocks = make_blocks()
        scheduler = PrefillScheduler(blocks, max_num_seqs=4)
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
        scheduler = PrefillScheduler(blocks, max_num_seqs=4, tail_chunk_tokens=tail)
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
        scheduler = PrefillScheduler(blocks, max_num_seqs=8)
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
        scheduler = PrefillScheduler(make_blocks(), max_num_seqs=3)
        for name in "abc":
            scheduler.add(make_sequence(name, 4))
        assert lengths(scheduler.plan(100, num_running=2)) == [("a", 4)]

    def test_those_that_decode_keep_a_block_each_to_grow_into(self) -> None:
        scheduler = PrefillScheduler(make_blocks(6), max_num_seqs=8)
        scheduler.add(make_sequence("a", 16))
        assert scheduler.plan(100, num_running=3) == []
        assert lengths(scheduler.plan(100, num_running=2)) == [("a", 16)]

    def test_removed_sequences_are_forgotten_wherever_they_are(self) -> None:
        scheduler = PrefillScheduler(make_blocks(), max_num_seqs=1)
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
        scheduler = PrefillScheduler(blocks, max_num_seqs=3, tail_chunk_tokens=tail)
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


def make_decode(
    num_blocks: int = 64, max_num_seqs: int = 4, max_num_prefill_tokens: int = 1000
) -> tuple[BlockManager, DecodeScheduler]:
    blocks = make_blocks(num_blocks)
    prefill = PrefillScheduler(blocks, max_num_seqs=max_num_seqs)
    return blocks, DecodeScheduler(
        blocks, prefill, max_num_seqs=max_num_seqs, max_num_prefill_tokens=max_num_prefill_tokens
    )


class TestDecode:
    def make(self, num_blocks: int = 64, max_num_seqs: int = 4) -> tuple[BlockManager, DecodeScheduler]:
        return make_decode(num_blocks, max_num_seqs)

    def start(self, blocks: BlockManager, scheduler: DecodeScheduler, name: str, num_prompt_tokens: int) -> Sequence:
        """A sequence whose prompt is computed and whose first token is drawn."""
        sequence = make_sequence(name, num_prompt_tokens)
        assert blocks.reserve(sequence)
        sequence.num_computed = num_prompt_tokens
        blocks.publish_computed(sequence)
        sequence.token_ids.append(1)
        scheduler.add_running(sequence)
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
        planned = scheduler.plan(10)
        assert lengths(planned) == [("a", 1), ("b", 1), ("c", 8)]
        assert all(chunk.sample is not None for _, chunk in planned[:2])

    def test_a_sequence_grows_by_a_block_when_it_needs_one_and_stays_adjacent(self) -> None:
        blocks, scheduler = self.make()
        sequence = self.start(blocks, scheduler, "a", 3)
        sizes = []
        for _ in range(8):
            self.decode(blocks, scheduler.plan(4))
            sizes.append(len(sequence.block_ids))
        assert sizes == [1, 2, 2, 2, 2, 3, 3, 3]
        first = sequence.block_ids[0]
        assert sequence.block_ids == [first, first + 1, first + 2]

    def test_the_newest_is_preempted_and_computed_again_with_what_it_had_drawn(self) -> None:
        blocks, scheduler = self.make(num_blocks=5)
        old = self.start(blocks, scheduler, "old", 8)
        new = self.start(blocks, scheduler, "new", 8)
        scheduler.plan(4)  # old takes the fifth block, nothing is left for new
        assert scheduler.num_preemptions == 1
        assert list(scheduler.running) == [old] and list(scheduler.prefill.waiting) == [new]
        assert (new.block_ids, new.num_computed) == ([], 0)
        assert len(new.token_ids) == 9, "what was drawn stays"
        scheduler.remove(old)
        blocks.give_back(old)
        ((sequence, chunk),) = scheduler.plan(100)
        assert sequence is new and chunk.start + len(chunk.token_ids) == 9
        assert chunk.start == 8, "its own blocks were still cached"
        assert chunk.sample is not None and chunk.sample.position == 9

    def test_it_comes_back_before_those_that_never_ran(self) -> None:
        blocks, scheduler = self.make(num_blocks=5)
        self.start(blocks, scheduler, "old", 8)
        new = self.start(blocks, scheduler, "new", 8)
        scheduler.add(make_sequence("later", 4))
        scheduler.plan(4)
        assert scheduler.prefill.waiting[0] is new

    def test_a_sequence_alone_that_finds_no_block_preempts_itself(self) -> None:
        blocks, scheduler = self.make(num_blocks=4)
        other = blocks.pool.allocate(2)
        assert other is not None
        alone = self.start(blocks, scheduler, "alone", 8)
        assert scheduler.plan(4) == []
        assert not scheduler.running and list(scheduler.prefill.waiting) == [alone]
        blocks.pool.release(other)
        assert lengths(scheduler.plan(4)) == [("alone", 1)]

    @pytest.mark.parametrize(("max_num_seqs", "budget", "expected"), [(2, 10, 2), (4, 3, 3), (4, 10, 4)])
    def test_a_step_is_bounded_by_max_num_seqs_and_budget(self, max_num_seqs: int, budget: int, expected: int) -> None:
        blocks, scheduler = self.make(max_num_seqs=max_num_seqs)
        for name in "abcd":
            self.start(blocks, scheduler, name, 4)
        assert len(scheduler.plan(budget)) == expected

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
            planned = scheduler.plan(budget)
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
                elif sequence not in scheduler.running:
                    scheduler.prefill.remove(sequence)
                    scheduler.add_running(sequence)
            blocks.pool.check_invariants()
            assert blocks.pool.total_references() == sum(len(s.block_ids) for s in sequences)
        assert [sequence.num_output_tokens for sequence in sequences] == [wanted] * len(prompts)
        assert blocks.pool.count(BlockState.REFERENCED) == 0


class Overlapped:
    """Steps as on a GPU: the next one is planned and launched before the results of the last one are here."""

    def __init__(self, blocks: BlockManager, scheduler: DecodeScheduler, budget: int) -> None:
        self.blocks = blocks
        self.scheduler = scheduler
        self.budget = budget
        self.under_way: deque[list[Planned]] = deque()

    def launch(self) -> list[Planned]:
        planned = self.scheduler.plan(self.budget)
        for index, (sequence, chunk) in enumerate(planned):
            sequence.on_launched(chunk, index)
        if planned:
            self.under_way.append(planned)
        return planned

    def commit(self) -> None:
        for sequence, chunk in self.under_way.popleft():
            sequence.on_completed(chunk)
            if sequence.ended:
                self.give_back(sequence)
                continue
            sequence.num_computed += len(chunk.token_ids)
            self.blocks.publish_computed(sequence)
            if chunk.sample is None:
                continue
            assert chunk.sample.position == len(sequence.token_ids), "tokens are drawn in order, each once"
            sequence.token_ids.append(1)
            if sequence.num_output_tokens == sequence.sampling.max_tokens:
                sequence.ended = True
                self.scheduler.remove(sequence)
                self.give_back(sequence)
            elif sequence not in self.scheduler.running:
                self.scheduler.prefill.remove(sequence)
                self.scheduler.add_running(sequence)

    def give_back(self, sequence: Sequence) -> None:
        if not sequence.in_step:
            self.blocks.give_back(sequence)


class TestMixedSteps:
    """Prompts beside sequences that decode."""

    def test_a_prompt_alone_goes_in_one_chunk_and_beside_decodes_in_small_ones(self) -> None:
        blocks, scheduler = make_decode(max_num_prefill_tokens=8)
        engine = Overlapped(blocks, scheduler, budget=64)
        for name, size in (("a", 40), ("b", 20)):
            scheduler.add(make_sequence(name, size))
            assert lengths(engine.launch())[-1] == (name, 40 if name == "a" else 8)
        assert lengths(engine.under_way[-1]) == [("a", 1), ("b", 8)]
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
        scheduler.prefill.add(make_sequence("a", 5))  # as prefill's side of a hand-over does
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
            before = list(engine.under_way[-1]) if engine.under_way else []
            num_preemptions = scheduler.num_preemptions
            planned = engine.launch()
            decoding = [entry for entry in planned if entry.sequence in scheduler.running]
            prefilling = planned[len(decoding) :]
            assert decoding == planned[: len(decoding)]
            left = min(budget - len(decoding), beside if decoding else budget)
            self.check_bounds(decoding, prefilling, left)
            self.check_edges(prefilling, left)
            if scheduler.num_preemptions == num_preemptions and blocks.pool.num_available:
                self.check_nobody_left_out(before, planned)
            blocks.pool.check_invariants()
            if len(engine.under_way) == depth or (engine.under_way and (not planned or data.draw(st.booleans()))):
                engine.commit()
            if all(sequence.ended for sequence in sequences) and not engine.under_way:
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
            if chunk.sample is None or sequence.ended:
                continue
            if sequence.num_output_tokens + 1 < sequence.sampling.max_tokens:
                assert here[sequence].previous_chunk == index
            else:
                assert sequence not in here


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
