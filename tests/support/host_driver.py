"""A CUDA driver's copies, carried out on host memory; a reader of mapped memory on it."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.mapped import reads as mapped_reads
from splitserve.kvconnector.mapped.reads import MappedReader

POINTER, SIZE, SIZES = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)


ADDRESSES = ctypes.POINTER(ctypes.c_uint64)


NOT_SUPPORTED = 801


STREAM = 77
CONTEXT = 78


class HostDriver:
    """The copies of libcuda, done within host memory at once; batches where ``batches``, which fail where ``fails``.
    ``context``: the one that was made current last."""

    def __init__(self, *, batches: bool, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.context = 0
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ADDRESSES)(self.get_context)
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(self.set_context)
        self.fails = fails
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, SIZE, POINTER)(self.one)
        self.cuMemcpy2DAsync_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(SIZE * 16), POINTER)(self.rows)
        if batches:
            batch = ctypes.CFUNCTYPE(ctypes.c_int, ADDRESSES, ADDRESSES, SIZES, SIZE, POINTER, SIZES, SIZE, POINTER)
            self.cuMemcpyBatchAsync_v2 = batch(self.batch)
            batch = ctypes.CFUNCTYPE(ctypes.c_int, SIZE, ctypes.POINTER(SIZE * 14), ctypes.c_ulonglong, POINTER)
            self.cuMemcpy3DBatchAsync_v2 = batch(self.batch_of_rows)

    def get_context(self, found: "ctypes._Pointer[ctypes.c_uint64]") -> int:
        found[0] = CONTEXT
        return 0

    def set_context(self, context: int) -> int:
        self.context = context
        return 0

    def one(self, target: int, source: int, size: int, stream: int) -> int:
        self.calls.append("one")
        ctypes.memmove(target, source, size)
        return int(stream != STREAM)

    def rows(self, copy: "ctypes._Pointer[ctypes.Array[ctypes.c_size_t]]", stream: int) -> int:
        self.calls.append("rows")
        _, _, _, _, source, _, source_pitch, _, _, _, _, target, _, target_pitch, width, height = copy.contents
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return int(stream != STREAM)

    def batch(self, targets, sources, sizes, count, attributes, first, num_attributes, stream) -> int:
        self.calls.append("batch")
        assert ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0] == 1
        assert (first[0], num_attributes, stream) == (0, 1, STREAM)
        for index in range(0 if self.fails else count):
            ctypes.memmove(targets[index], sources[index], sizes[index])
        return NOT_SUPPORTED if self.fails else 0

    def batch_of_rows(self, count, operations, flags, stream) -> int:
        self.calls.append("batch of rows")
        assert (flags, stream) == (0, STREAM)
        for index in range(0 if self.fails else count):
            words = list(operations[index])
            assert [words[at] for at in (0, 3, 4, 5, 8, 9, 12, 13)] == [1, 0, 0, 1, 0, 0, 1, 1]
            _, source, source_pitch, _, _, _, target, target_pitch, _, _, width, height, _, _ = words
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return NOT_SUPPORTED if self.fails else 0


class Event:
    """An event of a stream that does everything at once."""

    def record(self, _stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """Streams do everything at once, in host memory."""
    driver = HostDriver(batches=True)
    monkeypatch.setattr(mapped_reads.ctypes, "CDLL", lambda _name: driver)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(cuda_stream=STREAM, synchronize=int))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return driver


def reader_of(memory: KVMemory, sources: list[KVMemory], num_streams: int = 2) -> MappedReader:
    theirs = sources[0].layout
    mappings = {rank: SimpleNamespace(address=source.region().blocks_address) for rank, source in enumerate(sources)}
    spans = memory.layout.block_layout.spans(0, theirs.block_layout)
    num_peer_blocks = sources[0].num_blocks
    return MappedReader(
        memory, theirs.block_layout, spans, mappings, num_peer_blocks=num_peer_blocks, num_streams=num_streams
    )
