"""Reads of a peer's GPU memory through a mapping of it: our GPU copies, and nobody on the other side does anything.

Nothing is posted to a transport, so there is no price per descriptor but that of queueing a copy, and no polling by the
source. Heads that both sides split differently are rows of one copy, a row per layer.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from splitserve.kvconnector.cuda_memory import PeerMapping
from splitserve.kvconnector.device_copies import OnDevice, Pending
from splitserve.kvconnector.layout import block_bytes, runs
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_agent import TransferError
from splitserve.kvconnector.read_plan import HeadSpan
from splitserve.messages import LayoutRecord

_UNIFIED = 4  # of CUmemorytype: the address tells where it is


class Copy(NamedTuple):
    """``height`` rows of ``width`` bytes, from ``source`` to ``target``; a row begins a pitch after the one before."""

    target: int
    source: int
    width: int
    height: int
    target_pitch: int
    source_pitch: int


class Blocks(NamedTuple):
    """``layout`` of a rank's blocks, ``address`` of the first one."""

    layout: LayoutRecord
    address: int


def block_copies(
    ours: Blocks, theirs: Blocks, span: HeadSpan, local: Sequence[int], remote: Sequence[int]
) -> Iterator[Copy]:
    """Of ``span``'s heads, of blocks ``remote`` of theirs to ``local`` of ours. Neighbours on both sides are one copy.
    Blocks of both sides have as many tokens."""
    target_pitch, source_pitch = (block_bytes(side.layout) // side.layout.num_layers for side in (ours, theirs))
    head_bytes = target_pitch // ours.layout.kv_heads_per_rank
    assert source_pitch == head_bytes * theirs.layout.kv_heads_per_rank, "blocks of different sizes"
    width = span.num_heads * head_bytes
    for first_local, first_remote, count in runs(local, remote):
        into = ours.address + first_local * block_bytes(ours.layout) + span.local_head * head_bytes
        out_of = theirs.address + first_remote * block_bytes(theirs.layout) + span.source_head * head_bytes
        height = count * ours.layout.num_layers
        if width == target_pitch == source_pitch:
            yield Copy(into, out_of, width * height, 1, width * height, width * height)
        else:
            yield Copy(into, out_of, width, height, target_pitch, source_pitch)


class _Memcpy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h."""

    _fields_ = [
        ("src_x_in_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_in_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_in_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class MappedReader:
    """Reads from one peer whose ranks' blocks are mapped: ``mappings`` by rank. Used by one thread, in whose current
    context they are; it has a stream of its own."""

    def __init__(
        self, memory: KVMemory, theirs: LayoutRecord, spans: Sequence[HeadSpan], mappings: dict[int, PeerMapping]
    ) -> None:
        self._ours = Blocks(memory.layout, memory.region().blocks_address)
        self._sources = [(span, Blocks(theirs, mappings[span.rank].address)) for span in spans]
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        # Not CDLL: that gives the GIL away for each call, and has to wait for it after each.
        self._driver = ctypes.PyDLL("libcuda.so.1")
        self._driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Memcpy2D), ctypes.c_void_p]

    def read(self, local: Sequence[int], remote: Sequence[int]) -> Pending:
        """Start copying what is ours of blocks ``remote`` to blocks ``local``. Raises :class:`TransferError`, and then
        nothing is under way any more."""
        copies = (block_copies(self._ours, theirs, span, local, remote) for span, theirs in self._sources)
        return self._start(itertools.chain.from_iterable(copies))

    def probe(self, target: int, count: int, size: int) -> Pending:
        """Start copying ``count`` pieces of ``size`` bytes, none adjacent, of the peer's blocks to ``target`` on."""
        source = self._sources[0][1].address
        offsets = range(0, 2 * size * count, 2 * size)
        return self._start(Copy(target + offset, source + offset, size, 1, size, size) for offset in offsets)

    def wait(self) -> None:
        """Until no copy is under way."""
        self._stream.synchronize()

    def _start(self, copies: Iterable[Copy]) -> Pending:
        stream = self._stream.cuda_stream
        for copy in copies:
            if copy.height == 1:
                status = self._driver.cuMemcpyAsync(copy.target, copy.source, copy.width, stream)
            else:
                status = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(_rows(copy)), stream)
            if status != 0:
                self.wait()
                raise TransferError(f"CUDA doesn't copy from the peer's mapped memory (status {status}): {copy}")
        return OnDevice(self._stream)


def _rows(copy: Copy) -> _Memcpy2D:
    return _Memcpy2D(
        src_memory_type=_UNIFIED,
        src_device=copy.source,
        src_pitch=copy.source_pitch,
        dst_memory_type=_UNIFIED,
        dst_device=copy.target,
        dst_pitch=copy.target_pitch,
        width_in_bytes=copy.width,
        height=copy.height,
    )
