"""KV gather and scatter: PyTorch's and Triton's against plain indexing; byte for byte, whatever the bytes are."""

import functools
import importlib
import operator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from splitserve.kernels.reference import kv_copy
from splitserve.kernels.registry import select_kernels

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# [num_blocks, L, G, 2, B, D]: the last ones have heads whose bytes are no multiple of 16, 8, 4
SHAPES = [
    (9, 3, 4, 2, 16, 64),
    (5, 2, 8, 2, 4, 80),
    (4, 1, 1, 2, 1, 128),
    (7, 2, 3, 2, 3, 6),
    (6, 2, 5, 2, 5, 3),
    (3, 2, 2, 2, 1, 1),
]
LARGE = (3, 2, 2, 2, 64, 128)  # more than one program for each run


@pytest.fixture(params=["reference.kv_copy", "triton.gather"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton.gather":
        pytest.importorskip("triton")
    return importlib.import_module(f"splitserve.kernels.{request.param}")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits: infinities and NaNs with payloads too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape).to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def head_ranges(num_heads: int) -> list[tuple[int, int]]:
    return sorted({(0, num_heads), (0, 1), (num_heads - 1, num_heads), (num_heads // 2, num_heads)})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
def test_gather_and_scatter(backend: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = random_bits(shape, dtype)
    ids = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))[: shape[0] - 1].to(DEVICE)
    for first, last in head_ranges(shape[2]):
        expected = memory[ids][:, :, first:last]
        out = random_bits(tuple(expected.shape), dtype, seed=2)
        backend.gather_kv(memory, ids, first, out)
        assert torch.equal(bits(out), bits(expected))
        target, source = random_bits(shape, dtype, seed=3), random_bits(tuple(out.shape), dtype, seed=4)
        wanted = target.clone()
        wanted[ids, :, first:last] = source
        backend.scatter_kv(source, ids, first, target)
        assert torch.equal(bits(target), bits(wanted))


def test_repeats_and_no_blocks_at_all(backend: ModuleType) -> None:
    memory = random_bits((4, 2, 3, 2, 4, 8), torch.float32)
    ids = torch.tensor([2, 0, 2], device=DEVICE)
    out = torch.empty((3, 2, 2, 2, 4, 8), device=DEVICE)
    backend.gather_kv(memory, ids, 1, out)
    assert torch.equal(bits(out), bits(memory[ids][:, :, 1:]))
    before = memory.clone()
    backend.gather_kv(memory, ids[:0], 1, out[:0])
    backend.scatter_kv(out[:0], ids[:0], 1, memory)
    assert torch.equal(bits(memory), bits(before))


@pytest.mark.parametrize(
    ("ids", "first_head", "out"),
    [
        (torch.zeros(2, dtype=torch.int32), 0, torch.empty(2, 2, 1, 2, 4, 8)),
        (torch.zeros(2, dtype=torch.int64), 2, torch.empty(2, 2, 2, 2, 4, 8)),
        (torch.zeros(2, dtype=torch.int64), -1, torch.empty(2, 2, 1, 2, 4, 8)),
        (torch.zeros(2, dtype=torch.int64), 0, torch.empty(3, 2, 1, 2, 4, 8)),
        (torch.zeros(2, dtype=torch.int64), 0, torch.empty(2, 2, 1, 2, 8, 4)),
        (torch.zeros(2, dtype=torch.int64), 0, torch.empty(2, 2, 1, 2, 4, 8, dtype=torch.float16)),
        (torch.zeros(2, dtype=torch.int64), 0, torch.empty(2, 2, 2, 2, 4, 8)[:, :, :1]),
    ],
)
def test_what_doesnt_fit_is_refused(backend: ModuleType, ids: Tensor, first_head: int, out: Tensor) -> None:
    memory = torch.zeros(4, 2, 3, 2, 4, 8)
    with pytest.raises(AssertionError):
        backend.gather_kv(memory, ids, first_head, out)
    with pytest.raises(AssertionError):
        backend.scatter_kv(out, ids, first_head, memory)
    assert not memory.any()


@pytest.mark.gpu
def test_offsets_beyond_32_bits_and_pinned_memory(backend: ModuleType) -> None:
    """KV memory of more than 2**31 elements of 8 bytes; the buffer on the host."""
    shape = (2300, 32, 8, 2, 64, 128)
    memory = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.tensor([2299, 1, 1100], device=DEVICE)
    content = random_bits((3, *shape[1:]), torch.bfloat16)
    for block, block_id in zip(content, ids.tolist(), strict=True):
        memory[block_id] = block
    out = torch.empty((3, 32, 3, 2, 64, 128), dtype=torch.bfloat16, pin_memory=True)
    backend.gather_kv(memory, ids, 5, out)
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(content[:, :, 5:]))
    memory.zero_()
    backend.scatter_kv(out, ids, 5, memory)
    assert torch.equal(bits(memory[ids][:, :, 5:]), bits(content[:, :, 5:]))
    assert not memory[:, :, :5].any() and not memory[ids.new_tensor([0, 2, 2298])].any()


def copied(source: Tensor, target: Tensor, pairs: list[tuple[int, int]], width: int, at_once: int = 4096) -> None:
    """The first ``width`` bytes of each row [n, rows, pitch]: of piece ``pairs[i][0]`` to piece ``pairs[i][1]``.

    So many pieces at once, nothing waiting in between."""
    from splitserve.kernels.triton.row_copy import RowCopier, Rows

    read = [source[piece].data_ptr() for piece, _ in pairs]
    written = [target[piece].data_ptr() for _, piece in pairs]
    rows = Rows(source.shape[1], width, target.shape[2], source.shape[2])
    bits = functools.reduce(operator.or_, (*read, *written), 0)
    on_gpu = DEVICE.type == "cuda"
    torch.cuda.synchronize() if on_gpu else None
    stream = torch.cuda.Stream(DEVICE) if on_gpu else None
    copier = RowCopier(stream, rows, bits & -bits)
    copier.start(written[:1], read[:1])  # it's compiled now
    if stream is not None:  # so that what follows is queued before the first one runs
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
    for first in range(0, len(pairs), at_once):
        copier.start(written[first : first + at_once], read[first : first + at_once])
    torch.cuda.synchronize() if on_gpu else None


@pytest.mark.parametrize("width", [16, 24, 8192, 16384, 20000, 32768, 7])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_between_two_memories(num_rows: int, width: int) -> None:
    """Whole blocks, and rows with what others have between them; in no order, and one source twice."""
    pytest.importorskip("triton")
    pitches = (width, width) if num_rows == 1 else (2 * width, 3 * width)
    source = random_bits((9, num_rows, pitches[0]), torch.uint8, seed=9)
    target = random_bits((30, num_rows, pitches[1]), torch.uint8, seed=30)
    pairs = [(8, 29), (0, 4), (3, 0), (3, 11), (5, 7), (1, 8)]
    wanted = target.clone()
    for read, written in pairs:
        wanted[written, :, :width] = source[read, :, :width]
    copied(source, target, pairs, width)
    assert torch.equal(target, wanted)
    copied(source, target, [], width)
    assert torch.equal(target, wanted)


def test_more_rows_than_programs() -> None:
    pytest.importorskip("triton")
    source, target = random_bits((80, 2, 64), torch.uint8), random_bits((80, 2, 64), torch.uint8, seed=1)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2)).tolist()
    copied(source, target, list(zip(order, reversed(order), strict=True)), 64)
    assert torch.equal(target[order[::-1]], source[order])


def test_more_pieces_and_more_copies_than_tables_hold() -> None:
    triton_row_copy = pytest.importorskip("splitserve.kernels.triton.row_copy")
    num_pieces = triton_row_copy._MOST_PIECES + 30
    source, target = (
        random_bits((num_pieces, 1, 16), torch.uint8),
        random_bits((num_pieces, 1, 16), torch.uint8, seed=1),
    )
    pairs = [(piece, (7 * piece + 3) % num_pieces) for piece in range(num_pieces)]
    assert num_pieces % 7
    copied(source, target, pairs, 16)
    assert torch.equal(target[[written for _, written in pairs]], source)
    target = torch.zeros_like(target)
    copied(source, target, pairs[:90], 16, at_once=9)
    assert torch.equal(target[[written for _, written in pairs[:90]]], source[:90])
    assert int(target.view(num_pieces, 16).any(dim=1).sum()) == 90


def test_a_copy_is_ready_once_the_device_has_read_all_tables_that_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts it would wait for the copy that one of them was filled for."""
    triton_row_copy = pytest.importorskip("splitserve.kernels.triton.row_copy")
    copier, most = (
        triton_row_copy.RowCopier(None, triton_row_copy.Rows(1, 16, 16, 16), 16),
        triton_row_copy._MOST_PIECES,
    )
    assert copier.is_ready(4 * most) and not copier.is_ready(4 * most + 1), "there are four"
    monkeypatch.setattr(copier._tables[1], "is_read", lambda: False)
    assert copier.is_ready(most) and not copier.is_ready(most + 1)


def test_the_registry_knows_both() -> None:
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    assert kernels.gather_kv is kv_copy.gather_kv and kernels.backends["scatter_kv"] == "reference"
