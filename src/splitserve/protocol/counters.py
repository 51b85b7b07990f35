"""Counters and gauges of a worker: each is declared once, as an annotated field of a struct that travels.

The engine counts in a :class:`WorkerCounters` and a :class:`TierCounters` per tier; heartbeats carry both to the router
as parts of a :class:`WorkerLoad`, with the counters that other objects own. Prometheus metrics and
docs/reference/metrics.md are made from the annotations, by :func:`metrics_of`.
"""

import typing
from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from splitserve.protocol.wire_numbers import Count, NonNegative

MAX_TIERS = 16
MAX_TIER_NAME = 32
MAX_BUCKETS = 32


@dataclass(frozen=True, slots=True)
class Counter:
    """Annotation of a field that only grows, from 0 at the worker's start."""

    help: str


@dataclass(frozen=True, slots=True)
class Gauge:
    """Annotation of a field that may rise and fall."""

    help: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Annotation of a :class:`Distribution`; ``buckets`` are their upper bounds, without the last one, infinity."""

    help: str
    buckets: tuple[int, ...]


class Distribution(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Counts of values by bucket, from the lowest bucket on, with the sum of the values. No counts: no values yet."""

    counts: Annotated[list[Count], msgspec.Meta(max_length=MAX_BUCKETS)] = []
    total: Count = 0

    def add(self, value: int, buckets: tuple[int, ...]) -> None:
        if not self.counts:
            self.counts = [0] * (len(buckets) + 1)
        self.counts[bisect_left(buckets, value)] += 1
        self.total += value

    def copy(self) -> "Distribution":
        return Distribution(list(self.counts), self.total)


STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def metrics_of(struct: type[msgspec.Struct]) -> dict[str, Counter | Gauge | Histogram]:
    """Return the annotated fields of ``struct`` with their annotations, in the order of their declaration."""
    hints: dict[str, Any] = typing.get_type_hints(struct, include_extras=True)
    found = {name: _metric(hint) for name, hint in hints.items()}
    return {name: found_metric for name in struct.__struct_fields__ if (found_metric := found[name]) is not None}


def _metric(hint: Any) -> Counter | Gauge | Histogram | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, Counter | Gauge | Histogram)), None)


class WorkerCounters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Counters of a worker's engine, which adds to them in place."""

    steps: Annotated[Count, Counter("Steps that the model ran")] = 0
    step_seconds: Annotated[NonNegative, Counter("Seconds in which a step ran")] = 0.0
    step_tokens: Annotated[Distribution, Histogram("Tokens of a step, of prompts and outputs", STEP_TOKEN_BUCKETS)] = (
        msgspec.field(default_factory=Distribution)
    )
    step_sequences: Annotated[Distribution, Histogram("Sequences of a step: the batch size", STEP_SEQUENCE_BUCKETS)] = (
        msgspec.field(default_factory=Distribution)
    )
    prompt_tokens: Annotated[Count, Counter("Prompt tokens computed, those of repeated attempts included")] = 0
    output_tokens: Annotated[Count, Counter("Output tokens drawn")] = 0
    prefix_hit_tokens: Annotated[Count, Counter("Prompt tokens found in the prefix cache, not computed")] = 0
    preemptions: Annotated[Count, Counter("Running sequences put back into the queue for lack of KV blocks")] = 0
    handovers: Annotated[Count, Counter("Hand-overs completed, as decode counts them")] = 0
    handover_bytes: Annotated[Count, Counter("KV bytes read in completed hand-overs")] = 0
    handover_failures: Annotated[Count, Counter("Hand-overs that ended without decode having all blocks")] = 0
    stale_messages: Annotated[
        Count, Counter("Messages dropped: of an old incarnation, an old attempt or an ended request")
    ] = 0
    kv_mismatches: Annotated[Count, Counter("Blocks that arrived with another digest than offered (--verify-kv)")] = 0
    reads_direct: Annotated[Count, Counter("Reads of whole blocks into their destination")] = 0
    reads_layers: Annotated[Count, Counter("Reads with one descriptor per layer of a block")] = 0
    reads_staged: Annotated[Count, Counter("Reads of whole blocks through a staging area")] = 0
    reads_gathered: Annotated[Count, Counter("Reads of pieces that the source gathered")] = 0
    reads_mapped: Annotated[Count, Counter("Reads by copy engines through a mapping of the peer's memory")] = 0
    reads_kernel: Annotated[Count, Counter("Reads by a kernel through a mapping of the peer's memory")] = 0
    tier_stored_blocks: Annotated[Count, Counter("Blocks offloaded, over all tiers")] = 0
    tier_loaded_blocks: Annotated[Count, Counter("Blocks onboarded and used, over all tiers")] = 0
    tier_failures: Annotated[Count, Counter("Copies that failed, and loads that took too long, over all tiers")] = 0
    peer_prefixes: Annotated[Count, Counter("Prefixes read from another worker's device or host tier")] = 0
    peer_prefix_blocks: Annotated[Count, Counter("Blocks of those prefixes")] = 0
    peer_prefix_misses: Annotated[Count, Counter("Prefixes that another worker was asked for and did not have")] = 0
    peer_prefix_failures: Annotated[Count, Counter("Reads of another worker's prefix that failed")] = 0
    other_copies: Annotated[Count, Counter("Hand-overs that continued from another copy of the blocks")] = 0
    host_offered_blocks: Annotated[Count, Counter("Blocks that moved to the host tier while on offer")] = 0
    reads_repeated: Annotated[Count, Counter("Reads repeated because offered blocks had moved")] = 0

    def count_step(self, num_sequences: int, num_tokens: int) -> None:
        """Count a step that has completed."""
        self.steps += 1
        self.step_sequences.add(num_sequences, STEP_SEQUENCE_BUCKETS)
        self.step_tokens.add(num_tokens, STEP_TOKEN_BUCKETS)

    def count_read(self, path: str) -> None:
        """Count a read that succeeded on ``path``, a :class:`splitserve.protocol.handover.reads.ReadPath`."""
        name = f"reads_{path}"
        setattr(self, name, getattr(self, name) + 1)


class TierCounters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Counters of one tier of KV below the device (docs/guides/tiers.md).

    Each tier is asked until one has the block: that one counts a hit, the tiers before it a miss.
    """

    hits: Annotated[Count, Counter("Blocks that requests asked for and the tier had")] = 0
    misses: Annotated[Count, Counter("Blocks that requests asked for and the tier did not have")] = 0
    stored_blocks: Annotated[Count, Counter("Blocks offloaded into the tier")] = 0
    loaded_blocks: Annotated[Count, Counter("Blocks copied from the tier; after a gap they are of no use")] = 0
    evicted_blocks: Annotated[Count, Counter("Blocks that gave their slot to others")] = 0
    failures: Annotated[Count, Counter("Copies that failed, in part or altogether")] = 0
    store_seconds: Annotated[NonNegative, Counter("Seconds that copies into the tier took")] = 0.0
    load_seconds: Annotated[NonNegative, Counter("Seconds that copies from the tier took")] = 0.0


class TierLoad(TierCounters, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec can, dataclasses can't
    """One tier's counters and gauges, as part of a heartbeat. Slots and blocks of a shared tier are not known: 0."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_TIER_NAME)]
    slots: Annotated[Count, Gauge("Slots for blocks")] = 0
    blocks: Annotated[Count, Gauge("Slots whose content can be loaded")] = 0
    stored_bytes: Annotated[Count, Counter("Bytes offloaded into the tier, by all ranks")] = 0
    loaded_bytes: Annotated[Count, Counter("Bytes onboarded from the tier, by all ranks")] = 0
    available: Annotated[int, msgspec.Meta(ge=0, le=1), Gauge("0 while the tier's server does not answer, else 1")] = 1


class WorkerLoad(WorkerCounters, frozen=True, kw_only=True):  # type: ignore[misc]  # likewise
    """A worker's gauges and counters, sent with each heartbeat."""

    num_waiting: Annotated[Count, Gauge("Requests that wait for prefill, or are in it")] = 0
    num_running: Annotated[Count, Gauge("Sequences that decode")] = 0
    waiting_tokens: Annotated[Count, Gauge("Prompt tokens still to be computed")] = 0
    blocks_free: Annotated[Count, Gauge("KV blocks without content")] = 0
    blocks_cached: Annotated[Count, Gauge("KV blocks of the prefix cache without references")] = 0
    blocks_referenced: Annotated[Count, Gauge("KV blocks in use")] = 0
    blocks_reserved: Annotated[Count, Gauge("KV blocks in use that have no content so far: room for what comes")] = 0
    blocks_quarantined: Annotated[Count, Gauge("KV blocks withheld until what may write to them has ended")] = 0
    reads_in_flight: Annotated[Count, Gauge("Reads of a peer's KV in flight")] = 0
    undeliverable_messages: Annotated[Count, Counter("Messages dropped: their receiver did not take them")] = 0
    malformed_messages: Annotated[Count, Counter("Messages dropped: they could not be decoded")] = 0
    resident_bytes: Annotated[Count, Gauge("Resident memory of the worker's processes")] = 0
    requests_tracked: Annotated[Count, Gauge("Requests and hand-overs that the worker holds state for")] = 0
    peers_ready: Annotated[Count, Gauge("Workers that this worker can read from")] = 0
    tier_blocks: Annotated[Count, Gauge("Blocks that can be loaded, over all tiers but the shared one")] = 0
    frozen: Annotated[int, msgspec.Meta(ge=0, le=1), Gauge("1 while a pause keeps the requests frozen, else 0")] = 0
    freeze_number: Count = 0  # of the SetFrozen that holds; 0 before the first
    step_error: Annotated[NonNegative, Gauge("Mean error of the predicted times of recent steps, as a ratio")] = 0.0
    minute_error: Annotated[
        NonNegative, Gauge("Error of the step time of the last minute in all, predicted before it, as a ratio")
    ] = 0.0
    tiers: Annotated[list[TierLoad], msgspec.Meta(max_length=MAX_TIERS)] = []
