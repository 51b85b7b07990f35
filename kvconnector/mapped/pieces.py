"""The pieces of blocks that a read through a mapping copies, for copy engines and for the kernel."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from splitserve.kvconnector.cuda.batch_copies import BlockPieces
from splitserve.kvconnector.layout.shape import Run
from splitserve.protocol.cache_layout import BlockLayout, HeadSpan

_FIRST_RUNS = 4
_GROWTH = 4
"""Growth of the parts of a read: while some runs of blocks are in flight, copies of this many times as many are built
and queued."""


class Blocks(NamedTuple):
    """Blocks of a rank: their ``layout`` and the ``address`` of the first."""

    layout: BlockLayout
    address: int


def span_pieces(ours: Blocks, theirs: Blocks, span: HeadSpan) -> BlockPieces:
    """Return ``span``'s heads as pieces of blocks, a row per layer. Blocks of both sides have equally many tokens."""
    target = ours.layout.rows(span.local_head, span.num_heads, span.field)
    source = theirs.layout.rows(span.source_head, span.num_heads, span.field)
    target_bytes, source_bytes = ours.layout.block_bytes, theirs.layout.block_bytes
    assert (target.count, target.width) == (source.count, source.width), "blocks of different sizes"
    assert target.count * target.pitch == target_bytes, "rows that don't lie evenly over the block"
    return BlockPieces(
        ours.address + target.offset,
        theirs.address + source.offset,
        target_bytes,
        source_bytes,
        target.count,
        target.width,
    )


class Launch(NamedTuple):
    """Launch of the kernel that copies rows: addresses of pieces, and the ``key`` of their shape: number of rows, their
    width, their pitches (local, remote), their alignment."""

    key: tuple[int, int, int, int, int]
    targets: Sequence[int]
    sources: Sequence[int]


class PiecesAlike(NamedTuple):
    """Pieces of one shape, whose ``key`` is that of their launch."""

    key: tuple[int, int, int, int, int]
    spans: Sequence[BlockPieces]


def by_shape(spans: Sequence[BlockPieces]) -> list[PiecesAlike]:
    """Return the pieces of each shape; nearly always all have one shape."""
    found = []
    for rows, alike in itertools.groupby(spans, lambda span: (span.rows, span.width, *span.pitches)):
        same, address_bits = list(alike), 0
        for target, source, target_bytes, source_bytes, *_ in same:
            address_bits |= target | source | target_bytes | source_bytes
        found.append(PiecesAlike((*rows, min(address_bits & -address_bits, 16)), same))
    return found


def launches(shapes: Sequence[PiecesAlike], found: Iterable[Run]) -> Iterator[Launch]:
    """Yield a launch for each shape of pieces."""
    found = list(found)
    local = [first + index for first, _, count in found for index in range(count)]
    remote = [first + index for _, first, count in found for index in range(count)]
    for key, spans in shapes:
        targets, sources = [], []
        for target, source, target_bytes, source_bytes, *_ in spans:
            targets += [target + block * target_bytes for block in local]
            sources += [source + block * source_bytes for block in remote]
        yield Launch(key, targets, sources)


def growing_parts(found: Iterable[Run]) -> Iterator[list[Run]]:
    """Split runs of blocks into parts, as they are asked for: a few that are soon in flight, then ever larger ones."""
    left, size = iter(found), _FIRST_RUNS
    while part := list(itertools.islice(left, size)):
        yield part
        size *= _GROWTH
