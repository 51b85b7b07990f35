"""The choice of an all-reduce by size."""

import pytest
import torch
from torch import Tensor

from splitserve.models.parallel.all_reduce import (
    CAPACITY_BYTES,
    ChosenAllReduce,
    KernelAllReduce,
    Measured,
    NcclAllReduce,
)
from splitserve.models.parallel.all_reduce import sizes_to_measure as sizes

ONE, TWO = (KernelAllReduce(name, CAPACITY_BYTES, lambda *_: None) for name in ("one-shot", "two-shot"))
WAYS = [NcclAllReduce(), ONE, TWO]


def measured(*times: dict[str, float]) -> list[Measured]:
    return [Measured(1024 << index, entry) for index, entry in enumerate(times)]


def test_each_size_takes_the_fastest_way_and_those_between_that_of_the_larger() -> None:
    chosen = ChosenAllReduce(
        WAYS,
        measured(
            {"nccl": 9.0, "one-shot": 3.0, "two-shot": 5.0},
            {"nccl": 9.0, "one-shot": 4.0, "two-shot": 5.0},
            {"nccl": 9.0, "one-shot": 7.0, "two-shot": 6.0},
            {"nccl": 9.0, "one-shot": 20.0, "two-shot": 12.0},
        ),
    )
    names = {size: chosen.way(size).name for size in (1, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 10**9)}
    assert names == {
        1: "one-shot", 1024: "one-shot", 1025: "one-shot", 2048: "one-shot", 2049: "two-shot", 4096: "two-shot",
        4097: "nccl", 8192: "nccl", 10**9: "nccl",
    }  # fmt: skip
    assert chosen.describe() == "one-shot up to 2 KiB, then two-shot up to 4 KiB, then nccl"


def test_beyond_what_was_measured_nccl_serves() -> None:
    chosen = ChosenAllReduce(WAYS, measured({"nccl": 9.0, "one-shot": 3.0}))
    assert chosen.way(1024).name == "one-shot"
    assert chosen.way(1025).name == "nccl"
    assert ChosenAllReduce(WAYS[:1], measured({"nccl": 9.0})).describe() == "nccl"


def test_the_way_that_serves_gets_the_norm_and_gives_its_rows() -> None:
    calls: list[tuple[object, ...]] = []

    def kernel(residual: Tensor, *rest: object) -> Tensor:
        calls.append(rest)
        return residual + 1

    way = KernelAllReduce("one-shot", CAPACITY_BYTES, kernel)
    chosen = ChosenAllReduce([NcclAllReduce(), way], measured({"nccl": 9.0, "one-shot": 3.0}))
    rows, norm = torch.zeros(2, 8), torch.ones(8)
    parts = rows.unsqueeze(0)
    normed = chosen.add(rows, parts, norm, 1e-5)
    assert normed is not None and torch.equal(normed, rows + 1)
    ((given_parts, max_spins, *given),) = calls
    assert given_parts is parts and max_spins == 0 and given[0] is norm and given[1] == 1e-5


@pytest.mark.parametrize("row_bytes", [2, 8192, 3000])
def test_sizes_fit_the_buffers(row_bytes: int) -> None:
    assert sizes(row_bytes)[0] == row_bytes
    assert CAPACITY_BYTES // 2 < sizes(row_bytes)[-1] <= CAPACITY_BYTES
