"""Columns that ranks gather through each other's memory: ranks are processes that share memory, under Triton's
interpreter. On GPUs see tests/end_to_end/test_tensor_parallel_gpu.py."""

from pathlib import Path

import pytest

from interpreted_ranks import run_ranks

pytest.importorskip("triton")

_RANK = """
import mmap, random, sys, time
import torch
from splitserve.kernels.triton import all_gather as ag
from splitserve.kernels.triton.peer_memory import PeerMemory

path, rank, size, start = sys.argv[1], *map(int, sys.argv[2:])
ag.PROGRAMS, ag._BLOCK = 2, 16
capacity = 7 * 40 * size * 4
stride = -(-ag.gather_bytes(capacity) // 4096) * 4096
with open(path, "r+b") as file:
    whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
mine = whole[stride * rank : stride * (rank + 1)]
mine[capacity : ag.gather_bytes(capacity)].view(torch.int32).fill_((2 * start + 2**31) % 2**32 - 2**31)
buffers = torch.tensor([whole.data_ptr() + stride * other for other in range(size)])
memory = PeerMemory(rank, size, capacity, buffers, torch.full((2, ag.PROGRAMS), start, dtype=torch.int32))
ready = whole[stride * size :].view(torch.int32)
ready[rank] = 1
while int(ready[:size].sum()) < size:
    time.sleep(0.001)
chosen = random.Random(7)
for call in range(40):
    rows, columns = chosen.choice([1, 3, 7]), chosen.choice([8, 33, 40])
    dtype = chosen.choice([torch.float32, torch.float16])
    generator = torch.Generator().manual_seed(call)
    parts = torch.randn(size, rows, columns, generator=generator).to(dtype)
    gathered = ag.gather_columns(memory, mine, parts[rank].clone())
    if chosen.random() < 0.5:
        time.sleep(0.002 * rank)  # others may be in the next call meanwhile, but may not write yet
    assert torch.equal(gathered, torch.cat(list(parts), 1)), (call, rank)
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("size", "start"), [(2, 2**30 - 3), pytest.param(3, 2**31 - 3, marks=pytest.mark.slow)])
def test_ranks_gather_columns_whatever_their_pace(size: int, start: int, tmp_path: Path) -> None:
    """``start``: calls that have been made, just before the flags or the counter of calls wrap around."""
    run_ranks(_RANK, size, tmp_path, start)
