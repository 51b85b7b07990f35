"""Checkpoints with FP8 weights: read, cut and dequantised on CPU; the products of a GPU under Triton's interpreter."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving import complete_all, greedy_bodies
from splitserve.common.errors import CheckpointError
from splitserve.kernels.fp8.linear import fp8_unavailable_reason, select_fp8
from splitserve.kernels.fp8.weight import GROUP, Fp8Weight
from splitserve.kernels.reference import linear
from splitserve.kernels.reference import operations as reference
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.linear_launch import Variant
from splitserve.models.config import Fp8Format, load_model_config
from splitserve.models.declared import declare, stored_weights
from splitserve.models.decoder import DecoderModel
from splitserve.models.demo import checkpoint as demo
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.checkpoint import read_records
from splitserve.models.weights.fp8_scales import ScaleReader
from splitserve.models.weights.loader import load_model
from splitserve.models.weights.reading import DummyReader, MappedReader, StagedReader
from splitserve.models.weights.shard import Shard
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
FORMATS = {"block": [128, 128], "tensor": None, "transformers": None}


def quantised(weight: Tensor, block: list[int] | None) -> tuple[Tensor, Tensor]:
    """The weight in FP8, and its scales."""
    if block is None:
        scale = weight.abs().amax() / LARGEST
        return (weight / scale).to(FP8), scale
    rows, columns = weight.shape
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    result = torch.empty(weight.shape, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().amax() / LARGEST
            result[at] = (weight[at] / scales[i, j]).to(FP8)
    return result, scales


def dequantised(weight: Tensor, scales: Tensor, block: list[int] | None) -> Tensor:
    if block is None:
        return weight.float() * scales
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight.float() * scales[rows][:, columns]


@pytest.fixture(scope="module", params=FORMATS)
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights in FP8, and in float32 as they are after that."""
    folder, block = tmp_path_factory.mktemp(request.param), FORMATS[request.param]
    shape = demo.DemoShape(192, 2, 8, 4, 32, 416, 300, 512, 1e4, tie_word_embeddings=False, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SHAPES, "odd", shape)
        plain = demo.write_demo_model(folder / "plain", shape="odd")
    fp8 = folder / "fp8"
    shutil.copytree(plain, fp8)
    stored, rounded = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = rounded[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name], scales = quantised(tensor, block)
            rounded[name] = dequantised(stored[name], scales, block)
            stored[f"{name}_scale" if request.param == "tensor" else f"{name}_scale_inv"] = scales
            of_activations = "activation_scale" if request.param == "transformers" else "input_scale"
            stored[f"{name.removesuffix('.weight')}.{of_activations}"] = torch.tensor(0.5)
    save_file(stored, fp8 / "model.safetensors")
    save_file(rounded, plain / "model.safetensors")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return fp8, plain


def load(path: Path) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype=torch.float32, device=CPU)


def greedy(model: DecoderModel, count: int = 12) -> list[int]:
    config = model.config
    cache = torch.zeros(2, config.num_layers, config.num_kv_heads, 2, 16, config.head_dim)
    runner = ModelRunner(model, cache)
    tokens = [3, 1, 4]
    for _ in range(count):
        spec = SampleSpec(0.0, 0, 1.0, 0, 0, len(tokens))
        (token,) = runner.run(StepPlan([ScheduledChunk(tokens, 0, [0, 1], spec)])).token_ids
        assert token is not None
        tokens.append(token)
    return tokens[3:]


def test_tokens_are_those_of_the_dequantised_weights(checkpoints: tuple[Path, Path]) -> None:
    fp8, plain = checkpoints
    assert greedy(load(fp8)) == greedy(load(plain))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_their_part_of_weights_and_scales(checkpoints: tuple[Path, Path], size: int) -> None:
    """Parts begin and end inside blocks."""
    fp8, plain = checkpoints
    config, records = load_model_config(fp8), read_records(fp8)
    expected = MappedReader(read_records(plain), torch.float32)
    assert config.fp8 is not None
    scales = ScaleReader(records, config.fp8.block)
    for rank in range(size):
        stacks = list(declare(config).layers[1].stacks())
        weights = [tuple(weight.part(Shard(rank, size)) for weight in stack) for stack in stacks]
        mapped = MappedReader(records, torch.float32, scales)
        staged = StagedReader(records, torch.float32, CPU, scales, num_threads=2, staging_bytes=5000)
        with torch.inference_mode():
            staged.announce(weights)
        for stack, parts in zip(stacks, weights, strict=True):
            assert mapped.is_fp8(parts) == staged.is_fp8(parts) == stack[0].may_be_fp8
            if not mapped.is_fp8(parts):
                assert torch.equal(staged.read(parts), expected.read(parts))
                continue
            for read in (mapped.read_fp8(parts), staged.read_fp8(parts)):
                assert read.weight.dtype == FP8 and read.scales.shape[0] == read.weight.shape[0]
                assert torch.equal(read.dequantised(torch.float32), expected.read(parts))
        staged.close()


def broken(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


GATE = "model.layers.1.mlp.gate_proj.weight"


def test_what_is_wrong_with_scales_is_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    fp8, plain = checkpoints
    (scale,) = (name for name in load_file(fp8 / "model.safetensors") if name.startswith(f"{GATE}_scale"))
    with pytest.raises(CheckpointError, match=f"lacks {GATE}_scale"):
        load(broken(fp8, tmp_path / "lost", lambda tensors: tensors.pop(scale)))
    with pytest.raises(CheckpointError, match=rf"{scale}.* has shape \[7, 5\]"):
        load(broken(fp8, tmp_path / "shape", lambda tensors: tensors.update({scale: torch.ones(7, 5)})))

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[GATE] = tensors[GATE].float()
        tensors.pop(scale)

    with pytest.raises(CheckpointError, match=r"gate_proj.*up_proj.*either all or none"):
        load(broken(fp8, tmp_path / "mixed", widen))
    undeclared = broken(plain, tmp_path / "plain", lambda tensors: tensors.update({GATE: tensors[GATE].to(FP8)}))
    with pytest.raises(CheckpointError, match=rf"{GATE} is stored as F8_E4M3: .*quantization_config"):
        load(undeclared)
    head = broken(fp8, tmp_path / "head", lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is stored as F8_E4M3: only the projections"):
        load(head)


def test_layers_that_were_left_alone_stay_as_they_are(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """As by "modules_to_not_convert": what counts is how a tensor is stored."""
    fp8, plain = checkpoints

    def restore(tensors: dict[str, Tensor]) -> None:
        whole = load_file(plain / "model.safetensors")
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            tensors.pop(name)
        tensors.update({name: tensor for name, tensor in whole.items() if name.startswith("model.layers.0.")})

    assert greedy(load(broken(fp8, tmp_path / "m", restore))) == greedy(load(plain))


def test_dummy_weights_come_in_the_declared_format(checkpoints: tuple[Path, Path]) -> None:
    config = load_model_config(checkpoints[0])
    weights = stored_weights(config)
    reader = DummyReader(weights, torch.float32, CPU, config.fp8)
    down = (weights["model.layers.0.mlp.down_proj.weight"].part(Shard(1, 2)),)
    assert not reader.is_fp8((weights["model.layers.0.input_layernorm.weight"].part(Shard(1, 2)),))
    read = reader.read_fp8(down)
    assert read.weight.dtype == FP8 and read.weight.shape == (192, 208)
    assert not reader.is_fp8((declare(config).head_weight.part(Shard()),))
    assert not DummyReader(weights, torch.float32, CPU).is_fp8(down)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; .*\[128, 128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; only 'e4m3'"),
        ({"quant_method": "awq"}, r"quantization_config \('awq'\) isn't supported"),
    ],
)
def test_other_formats_are_refused(tiny_llama: Path, tmp_path: Path, settings: dict[str, object], message: str) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_formats_are_read_from_the_config(checkpoints: tuple[Path, Path]) -> None:
    fp8, plain = checkpoints
    assert load_model_config(plain).fp8 is None
    block = json.loads((fp8 / "config.json").read_text())["quantization_config"]["weight_block_size"]
    assert load_model_config(fp8).fp8 == Fp8Format(None if block is None else (128, 128))
    assert replace(load_model_config(fp8), fp8=None) == load_model_config(plain)


def test_a_cpu_dequantises_and_says_why() -> None:
    assert fp8_unavailable_reason(CPU, torch.bfloat16) == "cpu has no FP8 units"
    pack, description = select_fp8(
        CPU,
        torch.float32,
        pack_linear=lambda weight: linear.PlainLinear(weight, rms_norm=reference.rms_norm, silu_mul=reference.silu_mul),
        rms_norm=reference.rms_norm,
        silu_mul=reference.silu_mul,
    )
    assert description == "FP8 weights are converted to float32: cpu has no FP8 units"
    weight = Fp8Weight(torch.ones(3, 4).to(FP8), torch.tensor([[2.0], [3.0], [4.0]]), 4)
    assert pack(weight)(torch.ones(1, 4)).tolist() == [[8.0, 12.0, 16.0]]


# ---- Triton ----

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0), reason="needs FP8 units"
)
FP8_UNITS = pytest.mark.skipif(fp8_unavailable_reason(DEVICE, torch.bfloat16) is not None, reason="needs FP8 units")


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.on_gpu
@TRITON
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 128, 128), (3, 256, 128), (5, 200, 200), (2, 96, 128)])
def test_rows_are_quantised_by_their_largest_element(rows: int, columns: int, group: int) -> None:
    from splitserve.kernels.fp8.triton_quantise import quantise_rows

    x = rand(rows, columns)
    x[0, :3] = torch.tensor([0.0, 9.0, -9.0])
    values, scales = quantise_rows(x, group)
    largest = torch.stack([part.abs().amax(1) for part in x.split(group, dim=1)], dim=1)
    torch.testing.assert_close(scales, largest / LARGEST)
    expected = (x / scales.repeat_interleave(group, 1)[:, :columns]).to(FP8).float()
    if DEVICE.type == "cpu":  # the interpreter loses the carry where rounding up gives a power of two
        kept = expected.abs().log2() != expected.abs().log2().round()
        assert torch.equal(values.float()[kept], expected[kept])
    else:
        assert bool(((values.float() - expected).abs() <= expected.abs() / 8 + 1e-2).all())  # a step at most
    zeros, scales = quantise_rows(torch.zeros(2, 128, device=DEVICE), 128)
    assert not bool(zeros.float().any()) and bool(scales.isfinite().all())


@pytest.mark.on_gpu
@TRITON
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 48, 128), (17, 40, 256), (3, 130, 384)])
def test_block_products(rows: int, outputs: int, columns: int) -> None:
    from splitserve.kernels.fp8.triton_linear import block_product
    from splitserve.kernels.fp8.triton_quantise import quantise_rows

    if DEVICE.type == "cpu" and rows > 16:
        rows = 18  # two tiles would take the interpreter too long
    x, x_scales = quantise_rows(rand(rows, columns), GROUP)
    weight, scales = quantised(rand(outputs, columns, seed=1).cpu(), [128, 128])
    scales = scales[torch.arange(outputs) // 128].contiguous().to(DEVICE)
    actual = block_product(x, x_scales, weight.to(DEVICE), scales, torch.float32)
    left = x.float() * x_scales.repeat_interleave(GROUP, 1)
    right = weight.to(DEVICE).float() * scales.repeat_interleave(GROUP, 1)
    tolerance = 1e-3 if DEVICE.type == "cpu" else 2e-2  # the FP8 units of a GPU add up with some 14 bits
    torch.testing.assert_close(actual, left @ right.T, rtol=tolerance, atol=tolerance)


@pytest.mark.on_gpu
@TRITON
@pytest.mark.parametrize("block_k", [128, 256, 512])
@pytest.mark.parametrize(("outputs", "columns"), [(10, 384), (7, 256)])
def test_the_product_of_a_row_is_rounded_as_that_of_several(outputs: int, columns: int, block_k: int) -> None:
    """The row comes in parts and at once, with a last part that isn't full, and outputs that programs don't share
    evenly."""
    from splitserve.kernels.fp8.triton_quantise import quantise_rows
    from splitserve.kernels.fp8.triton_row import launch_fp8_row

    exact = rand(2 * outputs, columns, seed=1)
    scales = torch.stack([part.abs().amax(1) for part in exact.split(GROUP, dim=1)], dim=1) / LARGEST
    weight = (exact / scales.repeat_interleave(GROUP, 1)).to(FP8)
    x, norm, bias = rand(1, columns), 1.0 + 0.1 * rand(columns, seed=2), rand(2 * outputs, seed=3)

    def expected(row: Tensor) -> Tensor:
        values, row_scales = quantise_rows(row, GROUP)
        left = values.float() * row_scales.repeat_interleave(GROUP, 1)
        return left @ (weight.float() * scales.repeat_interleave(GROUP, 1)).T

    def check(variant: Variant, out: Tensor, wanted: Tensor, **options: Any) -> None:
        # A norm's scale comes after the rounding here: a few elements are rounded to the number beside.
        tolerance = 0.02 if "norm" in options else 1e-4
        with tuning.forced(f"linear_{variant}", {"block_m": 1, "block_n": 4, "block_k": block_k, "num_warps": 4}):
            launch_fp8_row(variant, x, weight, scales, out, **options)
        assert float((out - wanted).norm() / wanted.norm()) < tolerance, variant

    plain, normed = expected(x), expected(reference.rms_norm(x, norm, 1e-5))
    check("plain", torch.empty(1, 2 * outputs, device=DEVICE), plain)
    residual = rand(1, 2 * outputs, seed=4)
    check("add", residual.clone(), residual + plain)
    check("add", residual.clone(), residual + plain + bias, bias=bias)
    check("norm", torch.empty(1, 2 * outputs, device=DEVICE), normed, norm=norm, eps=1e-5)
    gate, up = normed.chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    check("gated", torch.empty(1, outputs, device=DEVICE), gated, norm=norm, eps=1e-5)


@pytest.mark.gpu
@FP8_UNITS
@pytest.mark.parametrize("group", [GROUP, 512])
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
def test_products_on_a_gpu_are_near_the_dequantised_ones(group: int, rows: int) -> None:
    from splitserve.kernels.registry import select_kernels

    kernels = select_kernels(DEVICE, torch.bfloat16)
    pack, description = select_fp8(
        DEVICE,
        torch.bfloat16,
        pack_linear=kernels.pack_linear,
        rms_norm=kernels.rms_norm,
        silu_mul=kernels.silu_mul,
    )
    assert description == "FP8 weights and activations"
    plain = rand(768, 512, seed=1)
    scales = torch.stack([part.abs().amax(1) for part in plain.split(group, dim=1)], dim=1) / LARGEST
    weight = Fp8Weight((plain / scales.repeat_interleave(group, 1)).to(FP8), scales, group)
    packed, exact = pack(weight), kernels.pack_linear(weight.dequantised(torch.bfloat16))
    x, norm = rand(rows, 512).bfloat16(), rand(512, seed=2).bfloat16()
    for name in ("__call__", "after_norm", "gated_after_norm"):
        arguments = (x,) if name == "__call__" else (x, norm, 1e-5)
        actual, expected = getattr(packed, name)(*arguments).float(), getattr(exact, name)(*arguments).float()
        assert float((actual - expected).norm() / expected.norm()) < 0.06, name
    residual, bias = rand(rows, 768, seed=3).bfloat16(), rand(768, seed=4).bfloat16()
    expected = residual.float() + exact(x).float() + bias.float()
    packed.add_to(residual, x, bias=bias)
    assert float((residual.float() - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu2, FP8_UNITS],
        ),
    ],
)
def test_workers_that_share_the_work_answer_as_one(checkpoints: tuple[Path, Path], device: str) -> None:
    """With FP8 weights and with FP8 KV, which moves as it is."""
    fp8, _ = checkpoints
    prompts = [[3 + (7 * index + 3 * i) % 290 for i in range(length)] for index, length in enumerate((5, 64, 300))]
    bodies = greedy_bodies(fp8.name, prompts, 12)
    engine = EngineConfig(
        model=str(fp8),
        dtype="bfloat16" if device == "cuda" else "float32",
        device=device,
        kv_cache_dtype="fp8",
        kv_memory_bytes=64 << 20,
        max_num_seqs=8,
        threads=1,
        enable_prefix_caching=False,
    )
    tokens = []
    for workers in ({"num_mixed": 1}, {"num_prefill": 1, "num_decode": 1}):
        with LocalCluster(simple_spec(engine, port=0, **workers), log_level="warning") as running:
            answers = complete_all(running.url, bodies, at_once=False)
            assert [answer["status"] for answer in answers] == [200] * 3, answers
            tokens.append([answer["choices"][0]["token_ids"] for answer in answers])
    assert all(answer["splitserve"]["mode"] == "disaggregated" for answer in answers)
    assert device == "cpu" or "cuda_ipc" in answers[0]["splitserve"]["handover"]["transport"]
    assert tokens[0] == tokens[1] and len({tuple(each) for each in tokens[0]}) > 1
