"""Launch parameters of products that nobody tuned."""

import pytest
import torch

from splitserve.kernels.reference import operations as reference
from splitserve.kernels.tuning import linear_launch
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.linear_launch import CUBLAS, LinearLaunch, Variant, default_params, launch_params

EPS = 1e-5


@pytest.mark.parametrize(
    ("variant", "in_features", "block_n", "block_k", "num_warps"),
    [
        ("add", 300, 4, 512, 4),
        ("add", 2880, 4, 4096, 4),  # one block, however much of it is padding
        ("gated", 4096, 2, 4096, 4),
        ("add", 5120, 4, 1024, 4),
        ("norm", 5120, 8, 2048, 4),
        ("gated", 5120, 4, 1024, 2),
    ],
)
def test_blocks_of_one_row(variant: Variant, in_features: int, block_n: int, block_k: int, num_warps: int) -> None:
    launch = default_params(variant, torch.bfloat16, 4096, in_features, 1, num_processors=0)
    assert launch == LinearLaunch(1, block_n, block_k, num_warps=num_warps)


def test_one_row_takes_tiles_for_gates_of_many_inputs_alone() -> None:
    for variant, in_features, block_m in (("gated", 4096, 1), ("gated", 5120, 16), ("norm", 5120, 1), ("add", 5120, 1)):
        launch = default_params(variant, torch.bfloat16, 8192, in_features, 1, num_processors=132)  # type: ignore[arg-type]
        assert launch.block_m == block_m


def test_one_row_in_fp8_has_its_own_kernel() -> None:
    launch = default_params("gated", torch.float8_e4m3fn, 8192, 5120, 1, num_processors=132)
    assert (launch.block_m, launch.block_n, launch.block_k) == (1, 2, 4096)


@pytest.mark.parametrize(
    ("out_features", "num_processors", "block_n", "split_k"),
    [
        (2048, 132, 64, 4),  # 128 programs
        (3072, 132, 64, 2),  # 96: wide tiles in more parts would be 120, which isn't worth it
        (4096, 132, 64, 2),
        (5120, 132, 128, 3),  # 80 narrow tiles leave 52 multiprocessors idle, 40 wide ones in three parts 12
        (8192, 132, 64, 1),
        (9216, 132, 32, 1),  # 144 narrow tiles
        (5120, 160, 64, 2),
        (256, 132, 64, 6),  # not in more parts than the consumer kernel should sum
    ],
)
def test_programs_are_about_as_many_as_multiprocessors(
    out_features: int, num_processors: int, block_n: int, split_k: int
) -> None:
    launch = default_params("add", torch.bfloat16, out_features, 8192, 8, num_processors=num_processors)
    assert (launch.block_m, launch.block_n, launch.split_k) == (16, block_n, split_k) and launch.tma
    assert launch.leaves_parts == (split_k > 1)


def test_parts_have_inputs_to_read() -> None:
    assert default_params("add", torch.bfloat16, 2048, 1024, 8, num_processors=132).split_k == 2
    assert default_params("add", torch.bfloat16, 2048, 256, 8, num_processors=132).split_k == 1
    # Twelve blocks in five parts would be three for each, and the last part empty.
    assert default_params("add", torch.bfloat16, 1024, 2880, 8, num_processors=132).split_k == 4


@pytest.mark.parametrize(
    ("dtype", "in_features", "num_processors"),
    [
        (torch.bfloat16, 4096, 0),  # no bulk copy engine
        (torch.bfloat16, 4100, 132),  # which takes rows of whole vectors of 16 bytes
        (torch.bfloat16, 64, 132),  # fewer than a tile has
        (torch.float32, 4096, 132),
    ],
)
def test_what_the_bulk_copy_engine_cannot_load(dtype: torch.dtype, in_features: int, num_processors: int) -> None:
    sixteen, seventeen = (
        default_params("add", dtype, 4096, in_features, rows, num_processors=num_processors) for rows in (16, 17)
    )
    assert not sixteen.tma and sixteen.block_m == 16 and seventeen == CUBLAS


def test_parameters_that_an_entry_leaves_out_do_not_depend_on_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_launch, "multiprocessors", lambda: 132)
    with tuning.forced("linear_add", {"num_warps": 8}):
        assert launch_params("add", torch.bfloat16, 5120, 8192, 64) == LinearLaunch(num_warps=8)
    with tuning.forced("linear_add", {}):
        assert launch_params("add", torch.bfloat16, 5120, 8192, 64).split_k == 3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 24, 64])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(2048, 1024), (4608, 4600), (5120, 8192), (9216, 3072), (32064, 520)]
)
def test_results_are_those_of_the_reference(out_features: int, in_features: int, rows: int) -> None:
    from splitserve.kernels.triton import operations as triton_ops
    from splitserve.kernels.triton.linear import TritonLinear

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    x, norm, residual = random(rows, in_features), random(in_features), random(rows, out_features)
    weight, next_norm = random(out_features, in_features) * in_features**-0.5, random(out_features)
    linear = TritonLinear(weight, rms_norm=triton_ops.rms_norm, silu_mul=triton_ops.silu_mul)
    product = x.double() @ weight.double().T
    after_norm = reference.rms_norm(x, norm, EPS).double() @ weight.double().T

    total = residual.clone()
    normed = linear.add_to(total, x, next_norm, EPS)
    expected = (residual.double() + product).bfloat16()
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=2e-2)
    if launch_params("add", x.dtype, out_features, in_features, rows).leaves_parts:
        assert normed is not None
        torch.testing.assert_close(normed, reference.rms_norm(expected, next_norm, EPS), rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(linear.after_norm(x, norm, EPS).double(), after_norm, rtol=2e-2, atol=2e-2)
    gate, up = after_norm.chunk(2, dim=-1)
    gated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(linear.gated_after_norm(x, norm, EPS).double(), gated, rtol=3e-2, atol=3e-2)
