"""Steps before the first request: they trigger everything that is compiled, loaded or tuned on its first use. What
needs no weights (:func:`load_attention`) happens while these load.

On a GPU kernels are chosen, and some compiled, by properties of a step's sizes: whether a number is 1, a multiple of
16, beyond a bound. So there's a step of each kind of size, for prefill, decode and both together, and for each way to
draw. On CPU a step costs more than what it would save: two small ones do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

from splitserve.kernels.api import AttentionShape, Kernels, PagedBatch
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.models.runner.graph_sizes import longer_tokens
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.step import UNKNOWN_TOKEN, ChunkTable, SampleSpec, ScheduledChunk, StepPlan

_GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
_RANDOM = SampleSpec(temperature=1.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
_TOP_K = SampleSpec(temperature=0.7, top_k=20, top_p=1.0, seed=0, choice=0, position=1)
_TOP_P = SampleSpec(temperature=1.0, top_k=0, top_p=0.9, seed=0, choice=0, position=1)
_FILTERED = SampleSpec(temperature=1.0, top_k=2, top_p=0.9, seed=0, choice=0, position=1)
_SCORED = msgspec.structs.replace(_GREEDY, num_top_logprobs=1)
_LONG_CONTEXT = 4000
_LONG_CHUNK = 1024
_MIXED_COUNTS = (1, 3, 16, 64)  # sequences beside prompts: one, odd, a multiple of 16, many
_SAMPLES = (_GREEDY, _RANDOM, _TOP_K, _TOP_P, _FILTERED, _SCORED)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The scheduler's bounds of a worker's steps. There are ``num_blocks`` blocks of ``block_size`` tokens, and
    ``other_blocks`` in the groups of the cache after the first."""

    max_num_batched_tokens: int
    max_num_prefill_tokens_beside_decode: int
    max_num_prefill_tokens_within_objective: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    other_blocks: tuple[int, ...] = ()

    @property
    def longest_chunk(self) -> int:
        """Tokens of the largest chunk that a first step can have."""
        return min(self.max_num_batched_tokens, self.max_model_len - 1, self.num_blocks * self.block_size)


def load_attention(kernels: Kernels, shape: AttentionShape) -> None:
    """Load the attention kernels: run a decode token, a chunk, and both in one step, over a block of memory. Only the
    process's caches remember it."""
    if shape.device.type == "cuda":
        torch.cuda.set_device(shape.device)  # a thread begins with the first one
    with torch.inference_mode():
        attention = kernels.make_attention(shape)
        size = (1, shape.num_layers, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        kv_layer = torch.zeros(size, dtype=shape.dtype, device=shape.device)[:, 0]
        for query_lens in ([1], [2], [1, 2]):
            plan = attention.plan(PagedBatch(query_lens, [2] * len(query_lens), [[0]] * len(query_lens)))
            query = torch.zeros(
                (sum(query_lens), shape.num_heads, shape.head_dim), dtype=shape.dtype, device=shape.device
            )
            attention.run(query, kv_layer, plan)
    if shape.device.type == "cuda":
        torch.cuda.synchronize(shape.device)


def warm_up(runner: ModelRunner, limits: StepLimits) -> int:
    """Run the steps, and clear what they wrote. Returns their number."""
    plans = list(all_plans(limits) if runner.depends_on_sizes else few_plans(limits))
    for plan in plans:
        runner.run(plan)
    if runner.depends_on_sizes:
        runner.sampler.warm_up()
    if (launcher := runner.launcher) is not None:
        for first, second in overlapped_plans(limits):
            pending = [launcher.launch(first), launcher.launch(second)]
            for step in pending:
                step.wait()
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    runner.cache.clear(
        [1 + max(max(chunk.table(group).block_ids) for chunk in chunks) for group in range(runner.cache.num_groups)]
    )
    return len(plans)


def few_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """One small step of each kind."""
    yield StepPlan([_chunk(limits, min(8, limits.longest_chunk), sample=_FILTERED)])
    yield StepPlan([_decode(limits, 0, _FILTERED)])


def all_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Steps of every kind of size that ``limits`` allow, one after the other."""
    longest = limits.longest_chunk
    for length in chunk_lengths(longest, limits.block_size):
        yield StepPlan([_chunk(limits, length)])
    yield from _later_chunks(limits)
    if longest >= 16:
        yield StepPlan([_chunk(limits, longest // 4 + extra) for extra in range(3)])  # several prompts in a step
    yield from _mixed(limits)
    yield StepPlan([_decode(limits, limits.max_model_len - 1, _GREEDY)])
    for count in _counts(limits.max_num_seqs):
        for start in (0, limits.block_size, _LONG_CONTEXT):
            if start < limits.max_model_len:
                yield StepPlan([_decode(limits, start, _GREEDY)] * count)
    for count in (1, 3, limits.max_num_seqs):
        if count <= limits.max_num_seqs:
            for sample in _SAMPLES:
                yield StepPlan([_decode(limits, 0, sample)] * count)
            yield StepPlan([_decode(limits, 0, _SAMPLES[index % len(_SAMPLES)]) for index in range(count)])


def overlapped_plans(limits: StepLimits) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Pairs to be launched one right after the other: the second one continues what the first one draws."""
    prompt = StepPlan([_chunk(limits, min(limits.block_size, limits.longest_chunk))])
    decode = StepPlan([_decode(limits, 0, _GREEDY)])
    follower = StepPlan([_of_limits(limits, ScheduledChunk([UNKNOWN_TOKEN], 1, (), _GREEDY, 0))])
    for first in (prompt, decode, follower):
        yield first, follower
    if limits.longest_chunk > limits.block_size and limits.max_num_seqs > 1:
        yield decode, StepPlan([*follower.chunks, _chunk(limits, limits.block_size)])


def chunk_lengths(longest: int, block_size: int) -> list[int]:
    """Lengths of first chunks, up to ``longest``: 1, around a block, powers of two, and odd ones beside them."""
    lengths = {1, 2, 3, block_size - 1, block_size, block_size + 1, longest - 3, longest}
    power = 4
    while power < longest:
        lengths |= {power} if power > _LONG_CHUNK else {power, power + 5, power + power // 2}
        power *= 2
    return sorted(length for length in lengths if 1 <= length <= longest)


def _later_chunks(limits: StepLimits) -> Iterator[StepPlan]:
    """Chunks that continue a prompt, with and without a token to draw at their end."""
    size, room = limits.block_size, limits.longest_chunk
    for start, length in ((size, size), (size, 1), (2 * size, 3 * size), (size, size + 3), (size + 1, 1)):
        if start + length <= room:
            for sample in (None, _GREEDY):
                yield StepPlan([_chunk(limits, length, start=start, sample=sample)])


def _mixed(limits: StepLimits) -> Iterator[StepPlan]:
    """Prompts beside sequences that decode, as many as there may be."""
    beside = min(limits.max_num_prefill_tokens_beside_decode, limits.longest_chunk)
    most = limits.max_num_seqs - 1
    for count in sorted({count for count in (*_MIXED_COUNTS, most) if 1 <= count <= most}):
        room = min(beside, limits.max_num_batched_tokens - count)
        decodes = [_decode(limits, 0, _GREEDY)] * count
        for length in sorted({length for length in (1, 7, limits.block_size, room) if 1 <= length <= room}):
            for sample in (None, _GREEDY):
                yield StepPlan([*decodes, _chunk(limits, length, sample=sample)])
        if room > limits.block_size and limits.block_size + room <= limits.longest_chunk:
            yield StepPlan([*decodes, _chunk(limits, room, start=limits.block_size)])
    longest = min(limits.max_num_prefill_tokens_within_objective, limits.longest_chunk)
    for length in longer_tokens(beside, longest):
        for count in (1, 16, 64):
            if count <= most and count + length <= limits.max_num_batched_tokens:
                yield StepPlan([*[_decode(limits, 0, _GREEDY)] * count, _chunk(limits, length)])


def _counts(most: int) -> list[int]:
    """Numbers of sequences up to ``most``: 1, powers of two, and odd ones between them."""
    counts = {1, 3, most}
    power = 2
    while power <= most:
        counts |= {power, power + power // 2 + 1}
        power *= 2
    return sorted(count for count in counts if 1 <= count <= most)


def _chunk(limits: StepLimits, length: int, *, start: int = 0, sample: SampleSpec | None = _GREEDY) -> ScheduledChunk:
    return _of_limits(limits, ScheduledChunk([0] * length, start, (), sample))


def _decode(limits: StepLimits, start: int, sample: SampleSpec) -> ScheduledChunk:
    return _of_limits(limits, ScheduledChunk([0], start, (), sample))


def _of_limits(limits: StepLimits, chunk: ScheduledChunk) -> ScheduledChunk:
    """Return ``chunk`` with blocks for its tokens. There may be fewer: what is written twice and read is of no
    interest."""
    numbers = range(num_blocks_for(chunk.start + len(chunk.token_ids), limits.block_size))
    first, *others = [[index % count for index in numbers] for count in (limits.num_blocks, *limits.other_blocks)]
    tables = tuple(ChunkTable(0, table) for table in others)
    return msgspec.structs.replace(chunk, block_ids=first, other_tables=tables)
