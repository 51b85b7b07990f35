"""The Triton all-reduce among real processes: under the interpreter, over memory that they share.

The interpreter runs a rank's programs one after the other, so what is tested is the meeting of ranks, the reuse of
buffers and the arithmetic, at any pace of any rank.
"""

from pathlib import Path

import pytest

from interpreted_ranks import run_ranks

pytest.importorskip("triton")

_RANK = """
import mmap, random, sys, time
import torch
from splitserve.kernels.triton import all_reduce as ar, operations as triton_ops, peer_memory as pm
from whole_elements import make_whole

path, rank, size, capacity, start = sys.argv[1], *map(int, sys.argv[2:])
ar.PROGRAMS, ar._BLOCK, ar._LONGEST_ROW = 2, 16, 48
num_bytes, num_flagless = ar.buffer_bytes(capacity, size), ar.flagless_bytes(capacity, size)
with open(path, "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
whole = torch.frombuffer(shared, dtype=torch.uint8)
make_whole(whole.numpy())
stride = -(-(num_bytes + 2 * num_flagless) // 4096) * 4096

def memory_at(first_byte):
    buffers = torch.tensor([whole.data_ptr() + stride * r + first_byte for r in range(size)])
    return pm.PeerMemory(rank, size, capacity, buffers, torch.zeros(2, ar.PROGRAMS, dtype=torch.int32))

flagged, flagless = memory_at(0), {}
flagged.calls.fill_(start)
for dtype in (torch.float32, torch.float16):
    first = num_bytes + num_flagless * len(flagless)
    flagless[dtype] = memory_at(first)
    whole[stride * rank + first : stride * rank + first + num_flagless].view(dtype).fill_(-0.0)
flags = whole[stride * rank + num_bytes - pm.FLAG_BYTES * ar.PROGRAMS : stride * rank + num_bytes].view(torch.int32)
flags.fill_((2 * start + 2**31) % 2**32 - 2**31)
ready = whole[stride * size :].view(torch.int32)
ready[rank] = 1
while int(ready[:size].sum()) < size:
    time.sleep(0.001)
chosen = random.Random(7)
one, two, flagless_add = ar.one_shot_add, ar.two_shot_add, ar.flagless_add
phases = [one, one, two], [flagless_add], [one, two, flagless_add]
for call in range(70):
    dtype = chosen.choice([torch.float32, torch.float16])
    rows, add = chosen.choice([1, 2, 5, 9]), chosen.choice(phases[call // 30])
    columns, with_norm = chosen.choice([48, 48, 50]), chosen.random() < 0.7
    parts_of = []
    for r in range(size):
        num_parts = chosen.choice([1, 1, 2, 3])
        parts = torch.randn(num_parts, rows, columns, generator=torch.Generator().manual_seed(100 * call + r))
        parts[:, 0, :9] = -0.0
        parts_of.append(parts.to(dtype) if num_parts == 1 else parts)
    residual = torch.randn(rows, columns, generator=torch.Generator().manual_seed(call)).to(dtype)
    norm = torch.randn(columns, generator=torch.Generator().manual_seed(call)).to(dtype) if with_norm else None
    expected = residual.float()
    for parts in parts_of:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        expected += total.to(dtype).float()
    memory = flagless[dtype] if add is flagless_add else flagged
    normed = add(memory, residual, parts_of[rank], norm=norm, eps=1e-5)
    assert torch.equal(residual, expected.to(dtype)), (call, rank, add.__name__, rows, with_norm)
    assert (normed is not None) == (with_norm and columns <= 48 and add is not two), (call, rank)
    if normed is not None:
        assert torch.equal(normed, triton_ops.rms_norm(residual, norm, 1e-5)), (call, rank, rows)
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("size", "start"), [(2, 2**30 - 3), pytest.param(3, 2**31 - 3, marks=pytest.mark.slow)])
def test_ranks_add_up_whatever_their_pace(size: int, start: int, tmp_path: Path) -> None:
    """``start``: calls that have been made, just before the flags or the counter of calls wrap around."""
    run_ranks(_RANK, size, tmp_path, 9 * 64 * 4, start)
