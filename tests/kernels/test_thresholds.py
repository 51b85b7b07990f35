"""Top-k and top-p from few collected tokens, or from all: the tokens kept are the reference's, ties included."""

import itertools
import math

import pytest
import torch

from splitserve.kernels.reference import sampling
from splitserve.kernels.sampling import SamplingBatch
from splitserve.kernels.triton.sampling import _numbers
from splitserve.kernels.triton.thresholds import keep_thresholds

pytestmark = pytest.mark.on_gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILTERS = [*itertools.product((0, 1, 40, 8000, 10**6), (1.0, 0.95, 0.3)), (3, 1e-9)]
ONCE = [(0, 0.95), (1, 1.0), (40, 0.3), (8000, 0.95), (8000, 0.3), (10**6, 1.0), (3, 1e-9)]
"""Each of them, for rows that Triton's interpreter takes long for."""


@pytest.mark.parametrize(
    ("vocab_size", "group", "room", "dtype"),
    [
        pytest.param(40, 256, 2048, torch.float32, id="one group: all tokens are searched"),
        pytest.param(4096, 16, 2048, torch.float32, id="collected"),
        pytest.param(4096, 16, 2048, torch.bfloat16, id="bfloat16"),
        pytest.param(4096, 16, 2048, torch.float16, id="float16"),
        pytest.param(9001, 16, 2048, torch.float32, id="odd size"),
        pytest.param(9001, 16, 24, torch.float32, id="more reach the bound than there is room for"),
    ],
)
@pytest.mark.parametrize("spread", [0.05, 4.0], ids=["flat", "peaked"])
def test_kept_tokens_are_those_of_the_reference(
    vocab_size: int, group: int, room: int, dtype: torch.dtype, spread: float
) -> None:
    filters = ONCE if vocab_size > 1000 and DEVICE.type == "cpu" else FILTERS
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(len(filters), vocab_size, generator=generator)
    logits[:, vocab_size // 2 :] = (8 * logits[:, vocab_size // 2 :]).round() / 8  # ties
    logits = logits.to(dtype)
    heat = 0.8
    top_ks, top_ps = zip(*filters, strict=True)
    count = len(filters)
    batch = SamplingBatch([heat] * count, top_ks, top_ps, [1] * count, [0] * count, [0] * count)
    numbers = _numbers(batch, DEVICE)
    heats = numbers[4:].view(torch.float64)
    found = keep_thresholds(logits.to(DEVICE), numbers, heats, group=group, room=room).cpu()
    scaled = logits.double() / heat
    expected = sampling.keep_thresholds(scaled, top_ks, top_ps)
    for row, (top_k, top_p) in enumerate(filters):
        kept, wanted = logits[row].float() >= found[row], scaled[row] >= expected[row]
        assert found[row] in (-math.inf, logits[row, kept].float().min()), (top_k, top_p)
        if not torch.equal(kept, wanted):  # rounding may decide about a token at the edge of top-p, with all its ties
            edge = logits[row, kept ^ wanted]
            mass = scaled[row].softmax(0)[wanted].sum()
            assert top_p < 1 and bool((edge == edge[0]).all()), (top_k, top_p)
            assert abs(float(mass) - top_p) < 2e-3, (top_k, top_p)


def test_rows_without_a_filter_keep_everything() -> None:
    logits = torch.randn(3, 5000)
    batch = SamplingBatch([0.0, 1.0, 1.0], [5, 0, 2], [0.5, 1.0, 1.0], [1] * 3, [0] * 3, [0] * 3)
    numbers = _numbers(batch, DEVICE)
    heats = numbers[4:].view(torch.float64)
    found = keep_thresholds(logits.to(DEVICE), numbers, heats).cpu()
    assert found[:2].tolist() == [-float("inf")] * 2
    assert float(found[2]) == float(logits[2].topk(2).values[1])
