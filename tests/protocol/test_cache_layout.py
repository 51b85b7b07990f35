"""Cache layouts: every byte of a block belongs to a head of a layer and field, and ranks find theirs in a peer's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from splitserve.protocol.cache_layout import (
    BlockLayout,
    ByteRows,
    CacheGroup,
    CacheLayout,
    Field,
    GroupKind,
    HeadSpan,
    Sharding,
)

NUM_HEADS = (1, 2, 4, 6, 8)
NUM_RANKS = (1, 2, 3, 4, 6, 8)


@st.composite
def groups(draw: st.DrawFn) -> CacheGroup:
    fields = []
    for number in range(draw(st.integers(1, 3))):
        sharding = draw(st.sampled_from(Sharding))
        heads = 1 if sharding is Sharding.WHOLE else draw(st.sampled_from(NUM_HEADS))
        fields.append(Field(f"field {number}", "any", heads, draw(st.integers(1, 5)), sharding))
    kind = draw(st.sampled_from(GroupKind))
    layers = draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))
    window = 20 if kind is GroupKind.WINDOW else 0
    return CacheGroup(kind, tuple(sorted(layers)), 0 if kind is GroupKind.STATE else 16, tuple(fields), window)


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[BlockLayout, BlockLayout]:
    """The same group on two numbers of ranks that each split all of its fields evenly."""
    group = draw(groups())
    sizes = [size for size in NUM_RANKS if all(field.splits_over(size) for field in group.fields)]
    return BlockLayout(group, draw(st.sampled_from(sizes))), BlockLayout(group, draw(st.sampled_from(sizes)))


Owner = tuple[int, int, int, int]  # field, layer, the model's head, byte of the head


def owners(layout: BlockLayout, rank: int) -> list[Owner]:
    """Return what each byte of a rank's block is, by the definition: field after field ``[layer, head, bytes]``."""
    return [
        (number, layer, head, byte)
        for number, field in enumerate(layout.group.fields)
        for layer in range(layout.num_layers)
        for head in field.heads(rank, layout.num_ranks)
        for byte in range(field.head_bytes)
    ]


@given(two_sides())
def test_rows_of_all_heads_are_the_block(sides: tuple[BlockLayout, BlockLayout]) -> None:
    layout, _ = sides
    owned = owners(layout, 0)
    assert layout.block_bytes == len(owned)
    seen: list[int] = []
    for number, field in enumerate(layout.group.fields):
        for head in range(layout.heads_per_rank(number)):
            rows = layout.rows(head, 1, number)
            assert rows.num_bytes == layout.piece_bytes(1, number)
            assert len(list(rows)) == rows.count
            for layer, run in enumerate(rows):
                seen += run
                model_head = field.heads(0, layout.num_ranks)[head]
                assert [owned[at] for at in run] == [
                    (number, layer, model_head, byte) for byte in range(field.head_bytes)
                ]
    assert sorted(seen) == list(range(layout.block_bytes))


@given(two_sides())
def test_spans_bring_every_byte_to_its_place(sides: tuple[BlockLayout, BlockLayout]) -> None:
    """Blocks filled with what their bytes are: after the copies a rank has what it would have written itself."""
    ours, theirs = sides
    sources = [owners(theirs, rank) for rank in range(theirs.num_ranks)]
    for rank in range(ours.num_ranks):
        block: list[Owner | None] = [None] * ours.block_bytes
        spans = ours.spans(rank, theirs)
        for span in spans:
            pieces = theirs.rows(span.source_head, span.num_heads, span.field)
            places = ours.rows(span.local_head, span.num_heads, span.field)
            for place, piece in zip(places, pieces, strict=True):
                for target, source in zip(place, piece, strict=True):
                    assert block[target] is None, "written twice"
                    block[target] = sources[span.rank][source]
        assert block == owners(ours, rank)
        whole = ours.whole_source(rank, theirs)
        assert (whole is not None) == (owners(ours, rank) in sources)
        assert whole is None or {span.rank for span in spans} == {whole}


@given(st.sampled_from(NUM_HEADS), st.sampled_from(NUM_RANKS))
def test_heads_split_evenly_or_not_at_all(num_heads: int, num_ranks: int) -> None:
    field = Field("kv", "float32", num_heads, 1)
    held = [head for rank in range(num_ranks) for head in field.heads(rank, num_ranks)]
    copies = {held.count(head) for head in range(num_heads)}
    assert field.splits_over(num_ranks) == (len(copies) == 1 and max(held) < num_heads and 0 not in copies)


def test_a_field_that_every_rank_has_is_read_from_different_ranks() -> None:
    latent = CacheGroup(GroupKind.FULL, (0, 1), 16, (Field("latent", "bfloat16", 1, 16 * 576 * 2, Sharding.WHOLE),))
    ours, theirs = BlockLayout(latent, 8), BlockLayout(latent, 4)
    assert [ours.spans(rank, theirs) for rank in range(8)] == [(HeadSpan(rank % 4, 0, 0, 1),) for rank in range(8)]
    assert ours.block_bytes == theirs.block_bytes == 2 * 16 * 576 * 2 and ours.whole_source(5, theirs) == 1


def test_two_fields_lie_one_after_the_other() -> None:
    group = CacheGroup(GroupKind.STATE, (0, 3), 0, (Field("ssm", "float32", 4, 100), Field("conv", "bfloat16", 4, 10)))
    half = BlockLayout(group, 2)
    assert half.block_bytes == 2 * 2 * (100 + 10)
    assert half.rows(1, 1) == ByteRows(100, 200, 2, 100)
    assert half.rows(0, 2, 1) == ByteRows(400, 20, 2, 20)
    full = replace(group, kind=GroupKind.FULL, block_tokens=16)
    assert not CacheLayout((full,)).is_simple and not CacheLayout((full, group)).is_simple
    assert CacheLayout((replace(full, fields=group.fields[:1]),)).is_simple


def test_layouts_match_whatever_the_number_of_ranks() -> None:
    group = CacheGroup(GroupKind.FULL, (0,), 16, (Field("kv", "float32", 4, 10),))
    assert CacheLayout((group,), 1).matches(CacheLayout((group,), 4))
    assert CacheLayout((group,), 2).pool_size(65) == 3
    for other in (
        replace(group, layers=(1,)),
        replace(group, block_tokens=32),
        replace(group, fields=(replace(group.fields[0], dtype="int32"),)),
    ):
        assert not CacheLayout((group,)).matches(CacheLayout((other,)))
    window = replace(group, kind=GroupKind.WINDOW, window=40)
    assert not CacheLayout((group,)).matches(CacheLayout((group, group)))
    assert not CacheLayout((group, group)).matches(CacheLayout((group, window)))
    assert not CacheLayout((group, window)).matches(CacheLayout((group, replace(window, window=41))))


def test_nonsense_is_refused() -> None:
    field = Field("kv", "float32", 4, 10)
    with pytest.raises(ValueError, match="0 bytes"):
        replace(field, head_bytes=0)
    with pytest.raises(ValueError, match="layer"):
        CacheGroup(GroupKind.FULL, (), 16, (field,))
    full = CacheGroup(GroupKind.FULL, (0,), 16, (field,))
    window = CacheGroup(GroupKind.WINDOW, (1,), 16, (field,), 20)
    for kind, tokens, size in (
        (GroupKind.WINDOW, 16, 0),
        (GroupKind.FULL, 16, 20),
        (GroupKind.STATE, 16, 0),
        (GroupKind.FULL, 0, 0),
    ):
        with pytest.raises(ValueError, match=f"a group of kind {kind} has"):
            CacheGroup(kind, (0,), tokens, (field,), size)
    for groups, problem in (
        ((), "must be full"),
        ((window, full), "must be full"),
        ((full, replace(window, block_tokens=32)), r"same number of tokens, got \[16, 32\]"),
    ):
        with pytest.raises(ValueError, match=problem):
            CacheLayout(groups)
    layout = BlockLayout(full, 2)
    for first, count in ((-1, 1), (0, 0), (1, 2), (2, 1)):
        with pytest.raises(ValueError, match="of 2"):
            layout.rows(first, count)
