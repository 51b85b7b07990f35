"""Copies through a mapping of a peer's memory: which bytes they move, carried out within one process; their choice.

That a GPU moves them is in test_handover_gpu.
"""

import ctypes
import random

import pytest
import torch

from splitserve.handover import ReadPath
from splitserve.kvconnector.layout import block_bytes
from splitserve.kvconnector.mapped_reads import Blocks, Copy, block_copies
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl import _Peer
from splitserve.kvconnector.read_choice import ReadShape, choose_path
from splitserve.kvconnector.read_cost import CopyCost, LinkCost, ReadCost
from splitserve.kvconnector.read_plan import head_spans, heads_of
from splitserve.messages import LayoutRecord

NUM_BLOCKS = 12


def layout(num_ranks: int, num_kv_heads: int = 4) -> LayoutRecord:
    return LayoutRecord("m", "w", "float32", 4, 3, num_kv_heads, 2, tensor_parallel_size=num_ranks)


def carry_out(copy: Copy) -> None:
    for row in range(copy.height):
        ctypes.memmove(copy.target + row * copy.target_pitch, copy.source + row * copy.source_pitch, copy.width)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_each_rank_gets_its_heads_and_nothing_else_changes(prefill: int, decode: int, num_kv_heads: int) -> None:
    theirs, ours = layout(prefill, num_kv_heads), layout(decode, num_kv_heads)
    model = torch.randn(NUM_BLOCKS, 3, num_kv_heads, 2, 4, 2)
    sources = [KVMemory(theirs, NUM_BLOCKS) for _ in range(prefill)]
    for rank, source in enumerate(sources):
        heads = heads_of(theirs, rank)
        source.blocks.copy_(model[:, :, heads.start : heads.stop])
    chosen = random.Random(prefill * 10 + decode)
    remote, local = [1, 2, 3, 7, *chosen.sample([4, 5, 8, 9], 3)], [5, 6, 7, 8, *chosen.sample([0, 1, 10, 11], 3)]
    for rank in range(decode):
        memory = KVMemory(ours, NUM_BLOCKS)
        memory.blocks.fill_(-1.0)
        for span in head_spans(ours, rank, theirs):
            target = Blocks(ours, memory.region().blocks_address)
            source = Blocks(theirs, sources[span.rank].region().blocks_address)
            for copy in block_copies(target, source, span, local, remote):
                carry_out(copy)
        heads = heads_of(ours, rank)
        assert torch.equal(memory.blocks[local], model[remote][:, :, heads.start : heads.stop])
        others = [block for block in range(NUM_BLOCKS) if block not in local]
        assert (memory.blocks[others] == -1.0).all()


def test_neighbours_on_both_sides_are_one_copy() -> None:
    whole, half = layout(1), layout(2)
    size = block_bytes(whole)
    (span,) = head_spans(whole, 0, whole)
    assert list(block_copies(Blocks(whole, 0), Blocks(whole, 1 << 20), span, [4, 5, 6, 8], [0, 1, 2, 3])) == [
        Copy(4 * size, 1 << 20, 3 * size, 1, 3 * size, 3 * size),
        Copy(8 * size, (1 << 20) + 3 * size, size, 1, size, size),
    ]
    (span,) = head_spans(half, 1, whole)
    layer = size // 3
    assert list(block_copies(Blocks(half, 0), Blocks(whole, 1 << 20), span, [4, 5], [0, 1])) == [
        Copy(2 * size, (1 << 20) + layer // 2, layer // 2, 6, layer // 2, layer)
    ]


POSTED, COPY = LinkCost(2e-5, 5e-6, 270e9), CopyCost(2e-5, 1e12)
MAPPED = LinkCost(1e-5, 2e-6, 390e9)
MIB = 1 << 20


def shape(*, is_whole: bool, is_mapped: bool) -> ReadShape:
    return ReadShape(is_whole, 1, 32, 4 * MIB, 4 * MIB if is_whole else 8 * MIB, 16, 0, is_mapped)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_mapping_is_used_where_it_is_there_and_faster(*, is_whole: bool) -> None:
    other = ReadPath.DIRECT if is_whole else ReadPath.STAGED
    mapped, unmapped = (shape(is_whole=is_whole, is_mapped=each) for each in (True, False))
    assert choose_path(mapped, ReadCost(POSTED, COPY, None, MAPPED), 64) is ReadPath.MAPPED
    assert choose_path(mapped, ReadCost(POSTED, COPY, None, LinkCost(1e-5, 2e-6, 20e9)), 64) is other
    assert choose_path(mapped, ReadCost(POSTED, COPY), 64) is other
    assert choose_path(unmapped, ReadCost(POSTED, COPY, None, MAPPED), 64) is other
    assert ReadCost(POSTED, COPY, None, MAPPED).bytes_per_second == 390e9


def test_a_path_that_is_asked_for_is_taken_if_it_can_be() -> None:
    peer = _Peer(1, 1)
    assert peer.path(64, ReadPath.MAPPED) is ReadPath.DIRECT  # nothing is known yet
    peer.shape, peer.cost = shape(is_whole=True, is_mapped=True), ReadCost(POSTED, COPY, None, MAPPED)
    assert [peer.path(64, path) for path in ReadPath] == [
        ReadPath.DIRECT, ReadPath.MAPPED, ReadPath.MAPPED, ReadPath.MAPPED, ReadPath.MAPPED,
    ]  # fmt: skip
    peer.shape = shape(is_whole=False, is_mapped=False)
    assert peer.path(64, ReadPath.LAYERS) is ReadPath.LAYERS
    assert peer.path(64, ReadPath.MAPPED) is ReadPath.STAGED
