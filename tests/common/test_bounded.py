"""The bounded memory behind tombstones and parked messages, and the hashes that name a block's content."""

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from splitserve.common.bounded import ExpiringMap
from splitserve.protocol.block_hash import extend_hashes, root_hash, salted_root
from splitserve.protocol.memory_records import LayoutRecord

LAYOUT = LayoutRecord("m", "w", "float32", 4, 1, 1, 1)


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "get"]), st.integers(0, 9), st.floats(0, 4)), max_size=60))
def test_it_keeps_the_newest_for_their_time(operations: list[tuple[str, int, float]]) -> None:
    ttl, max_size, now = 10.0, 4, 0.0
    map_: ExpiringMap[int, float] = ExpiringMap(max_size=max_size, ttl_seconds=ttl)
    model: list[tuple[int, float]] = []
    for operation, key, seconds in operations:
        now += seconds
        model = [(k, put_at) for k, put_at in model if put_at + ttl > now]
        expected = dict(model).get(key)
        if operation == "put":
            map_.put(key, now, now)
            model = [*((k, t) for k, t in model if k != key), (key, now)][-max_size:]
        elif operation == "pop":
            assert map_.pop(key, now) == expected
            model = [(k, t) for k, t in model if k != key]
        else:
            assert map_.get(key, now) == expected
        assert len(map_) == len(model) <= max_size
        assert all(k in map_ for k, _ in model)


def hashes_of(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root, tokens, block_size)
    return hashes


def test_a_hash_names_the_whole_beginning_and_all_that_the_bytes_depend_on() -> None:
    root = root_hash(LAYOUT)
    others = [LayoutRecord("n", "w", "float32", 4, 1, 1, 1), LayoutRecord("m", "v", "float32", 4, 1, 1, 1)]
    others += [LayoutRecord("m", "w", "bfloat16", 4, 1, 1, 1), LayoutRecord("m", "w", "float32", 8, 1, 1, 1)]
    assert len({root, salted_root(root, "tenant"), *(root_hash(other) for other in others)}) == 6
    assert hashes_of(root, [1, 2, 3, 4], 4) != hashes_of(root, [1, 2, 4, 3], 4)
    assert hashes_of(root, [0, 1], 1)[1] != hashes_of(root, [1], 1)[0]
    assert len(root) == len(hashes_of(root, [1], 1)[0]) == 16


def test_hashes_are_extended_by_full_blocks_only() -> None:
    hashes: list[bytes] = []
    tokens = list(range(11))
    extend_hashes(hashes, b"root", tokens[:7], 4)
    assert len(hashes) == 1
    extend_hashes(hashes, b"root", tokens, 4)
    whole = hashes_of(b"root", tokens, 4)
    assert hashes == whole and len(whole) == 2
    packed = hashes_of(b"root", array("i", tokens), 4)
    assert packed == whole == [*hashes_of(b"root", tokens[:4], 4), *hashes_of(whole[0], tokens[4:8], 4)]
