"""KV memory on a CPU: its pages are allocated beside the start, hold what was written meanwhile, and must exist."""

import mmap
import threading

import psutil
import pytest
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout import memory as module
from splitserve.kvconnector.layout.memory import KVMemory, anonymous_memory, populate, words_of
from splitserve.kvconnector.layout.numa_memory import pages_by_node
from splitserve.protocol.cache_layout import BlockLayout, CacheGroup, Field, GroupKind
from splitserve.protocol.memory_records import LayoutRecord
from waiting import wait_until

LAYOUT = LayoutRecord("m", "w", "float32", 16, 2, 2, 8)


def num_resident_pages(memory: torch.Tensor) -> int:
    pages = pages_by_node(memory.data_ptr(), memory.nbytes)
    if not pages:
        pytest.skip("this platform doesn't say which pages are resident")
    return sum(pages.values())


def test_memory_is_there_before_its_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    may_populate = threading.Event()

    def held_up(memory: torch.Tensor) -> int:
        may_populate.wait()
        return populate(memory)

    monkeypatch.setattr(module, "populate", held_up)
    monkeypatch.setattr(module, "POPULATE_CHUNK_BYTES", 4 * mmap.PAGESIZE)
    memory = KVMemory(LAYOUT, 1024)
    num_pages = memory.blocks.nbytes // mmap.PAGESIZE
    try:
        assert not memory.blocks[1].any()
        memory.blocks[1] = 7.0
        assert 0 < num_resident_pages(memory.blocks) < num_pages
    finally:
        may_populate.set()
    wait_until(lambda: num_resident_pages(memory.blocks) == num_pages, "all pages")
    assert bool((memory.blocks[1] == 7.0).all())
    assert not memory.blocks[0].any() and not memory.blocks[2:].any()


def test_populating_leaves_what_is_written_meanwhile() -> None:
    flat = torch.frombuffer(anonymous_memory(64 << 20), dtype=torch.uint8)
    thread = threading.Thread(target=populate, args=(flat,))
    thread.start()
    for page in range(0, len(flat), mmap.PAGESIZE):
        flat[page] = page // mmap.PAGESIZE % 251
    thread.join()
    expected = torch.arange(len(flat) // mmap.PAGESIZE) % 251
    assert torch.equal(flat[:: mmap.PAGESIZE].long(), expected)


def test_more_memory_than_is_available_is_refused() -> None:
    num_blocks = (psutil.virtual_memory().available + (1 << 30)) // KVMemory(LAYOUT, 1).block_bytes
    with pytest.raises(ConfigError, match=r"cannot allocate \S+ GiB of KV memory: \S+ GiB are available; lower --kv"):
        KVMemory(LAYOUT, num_blocks)


@pytest.mark.parametrize(
    ("sizes", "word"), [((24,), torch.int64), ((24, 12), torch.int32), ((10, 4), torch.int16), ((7,), torch.uint8)]
)
def test_a_fields_words_are_its_bytes(sizes: tuple[int, ...], word: torch.dtype) -> None:
    """Without a copy; also where the fields have heads of different sizes."""
    fields = tuple(Field(f"field {number}", "any", 4, size) for number, size in enumerate(sizes))
    layout = BlockLayout(CacheGroup(GroupKind.FULL, (0, 1, 2), 16, fields), 2)
    blocks = torch.arange(5 * layout.block_bytes).to(torch.uint8).view(5, -1)
    for number, size in enumerate(sizes):
        words = words_of(blocks, layout, number)
        assert words.dtype is word and words.shape == (5, 3, 2, size // word.itemsize)
        for head in range(2):
            expected = torch.cat([blocks[:, run.start : run.stop] for run in layout.rows(head, 1, number)], dim=1)
            assert torch.equal(words[:, :, head].contiguous().view(torch.uint8).view(5, -1), expected)
        words.zero_()
    assert not blocks.any()
