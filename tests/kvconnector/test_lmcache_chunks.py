"""The content of chunks in an LMCache server: names, checksums, damage."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from lmcache_server import LAYOUT
from splitserve.kvconnector.lmcache.chunk import ChunkFormat, checksum
from splitserve.kvconnector.lmcache.link import model_name_of


def chunk_of(form: ChunkFormat, seed: int) -> tuple[np.ndarray, list[bytes], list[np.ndarray]]:
    chosen = np.random.default_rng(seed)
    hashes = [chosen.bytes(16) for _ in range(form.num_blocks)]
    blocks = [chosen.integers(0, 256, form.block_bytes, dtype=np.uint8) for _ in range(form.num_blocks)]
    chunk = np.zeros(form.num_bytes, dtype=np.uint8)
    form.write(chunk, hashes, blocks)
    return chunk, hashes, blocks


def num_right(form: ChunkFormat, chunk: np.ndarray, hashes: list[bytes]) -> int:
    entries = form.entries(chunk)
    parts = range(len(entries))
    return sum(form.is_right(entries[n], hashes[n], form.block(chunk, n)) for n in parts)


def test_a_chunk_says_what_it_holds() -> None:
    form = ChunkFormat(b"r" * 16, 4, 4096)
    chunk, hashes, blocks = chunk_of(form, 1)
    assert num_right(form, chunk, hashes) == 4
    assert all((form.block(chunk, n) == block).all() for n, block in enumerate(blocks))
    _, others, _ = chunk_of(form, 2)
    assert num_right(form, chunk, others) == 0, "another prompt's"
    assert ChunkFormat(b"s" * 16, 4, 4096).entries(chunk) == [], "another model's"
    assert ChunkFormat(b"r" * 16, 2, 8192).entries(chunk) == [], "other blocks"


@pytest.mark.parametrize("seed", range(30))
def test_a_torn_chunk_is_seen(seed: int) -> None:
    """Some of its bytes are what was there before, or another content, from some point on."""
    form = ChunkFormat(b"r" * 16, 4, 4096)
    chunk, hashes, _ = chunk_of(form, seed)
    other, _, _ = chunk_of(form, seed + 1000)
    torn = chunk.copy()
    start = int(np.random.default_rng(seed).integers(form.num_bytes - form.num_blocks * 4096, form.num_bytes - 8))
    torn[start:] = other[start:] if seed % 2 else 0
    wrong = sum(not (form.block(torn, n) == form.block(chunk, n)).all() for n in range(4))
    assert wrong >= 1
    assert num_right(form, torn, hashes) == 4 - wrong


@pytest.mark.parametrize("num_bytes", [8, 100, 4096, 3 * 4096, 5 * 4096 + 13])
def test_a_checksum_sees_any_bit_and_any_place(num_bytes: int) -> None:
    chosen = np.random.default_rng(num_bytes)
    block = chosen.integers(0, 256, num_bytes, dtype=np.uint8)
    seen = {checksum(block)}
    for number in chosen.integers(0, 8 * num_bytes, 100):
        flipped = block.copy()
        flipped[number // 8] ^= 1 << (number % 8)
        assert checksum(flipped) not in seen
        flipped[-1 - number // 8] ^= 1 << (number % 8)
        assert checksum(flipped) not in seen, "two bits of the same weight"
    for unit in (unit for unit in (1, 2, 8, 64, 4096) if 2 * unit <= num_bytes):
        moved = block.copy()
        moved[:unit], moved[unit : 2 * unit] = block[unit : 2 * unit], block[:unit]
        assert checksum(moved) not in seen, f"{unit} bytes changed places with the next ones"
        moved[:unit], moved[unit:] = 0, block[unit:]
        assert checksum(moved) not in seen, f"{unit} bytes are zero"
    assert checksum(block) in seen


def test_a_half_written_chunk_is_nobodys() -> None:
    form = ChunkFormat(b"r" * 16, 4, 4096)
    chunk, hashes, _ = chunk_of(form, 1)

    class Died(Exception):
        pass

    class Blocks(list[np.ndarray]):
        def __iter__(self) -> Iterator[np.ndarray]:
            yield np.zeros(4096, dtype=np.uint8)
            raise Died

    with pytest.raises(Died):
        form.write(chunk, hashes, Blocks([None] * 4))  # type: ignore[list-item]
    assert form.entries(chunk) == []


def test_names_cover_all_that_the_bytes_depend_on() -> None:
    changes = {
        "model": "models/other", "weights_version": "weights-2", "dtype": "bfloat16", "block_size": 32,
        "num_layers": 5, "num_kv_heads": 4, "head_dim": 128, "order": "other",
    }  # fmt: skip
    names = {model_name_of(msgspec.structs.replace(LAYOUT, **{name: value})) for name, value in changes.items()}
    assert len(names | {model_name_of(LAYOUT)}) == len(changes) + 1
    assert not any(set(name) & set("@/\\\x00") for name in names)
    sizes = [msgspec.structs.replace(LAYOUT, num_kv_heads=4, tensor_parallel_size=size) for size in (1, 2, 4)]
    shards = [model_name_of(layout, rank) for layout in sizes for rank in range(layout.tensor_parallel_size)]
    assert len(set(shards)) == 7, "ranks of workers of other sizes have other heads"
