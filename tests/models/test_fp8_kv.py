"""KV memory in FP8: near what it is without, the same wherever a request runs, with a checkpoint's scales."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving import complete_all, greedy_bodies, wait_until_quiet
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.fp8.kv import FP8, DequantisingAttention
from splitserve.kernels.reference.attention import ReferencePagedAttention
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.checkpoint import read_records
from splitserve.models.weights.kv_scales import KVScales, read_kv_scales
from splitserve.models.weights.loader import load_model
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

CPU = torch.device("cpu")


def runner_of(path: Path, kv_dtype: torch.dtype) -> ModelRunner:
    config, kernels = load_model_config(path), select_kernels(CPU, torch.float32)
    if kv_dtype == FP8:
        kernels = replace(kernels, make_attention=lambda shape: DequantisingAttention(shape, ReferencePagedAttention))
    model = load_model(path, config, dtype=torch.float32, device=CPU, kernels=kernels, kv_dtype=kv_dtype)
    cache = torch.zeros(4, config.num_layers, config.num_kv_heads, 2, 16, config.head_dim, dtype=kv_dtype)
    return ModelRunner(model, cache)


def prefill(runner: ModelRunner, length: int = 40) -> Tensor:
    """The KV memory after a prompt, in float32."""
    spec = SampleSpec(0.0, 0, 1.0, 0, 0, length)
    runner.run(StepPlan([ScheduledChunk(list(range(300, 300 + length)), 0, [2, 0, 3], spec)]))
    return runner.cache.groups[0].float()


def with_scales(source: Path, target: Path, scales: dict[str, Tensor]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    save_file({**tensors, **scales}, target / "model.safetensors")
    return target


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_first_layer_holds_the_same_numbers_rounded(architecture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"tiny_{architecture}")
    exact, rounded = prefill(runner_of(path, torch.float32)), prefill(runner_of(path, FP8))
    assert torch.equal(rounded[:, 0], exact[:, 0].to(FP8).float())
    used = [2, 0, 3]
    assert float((rounded[used] - exact[used]).norm() / exact[used].norm()) < 0.25


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_scales_of_a_checkpoint_divide_what_is_stored(
    architecture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A power of two changes no digit: the stored numbers times the scales are those without."""
    path: Path = request.getfixturevalue(f"tiny_{architecture}")
    scales = {
        f"model.layers.{index}.self_attn.{name}_scale": torch.tensor(value)
        for index in range(4)
        for name, value in (("k", 3.0), ("v", 0.25))
    }
    scaled_path = with_scales(path, tmp_path / "m", scales)
    records = read_records(scaled_path)
    for index in range(4):
        key, value = (f"model.layers.{index}.self_attn.{name}_scale" for name in "kv")
        assert read_kv_scales(records, ["absent", key], [value, key]) == KVScales(4.0, 0.25)
    plain, scaled = prefill(runner_of(path, torch.float32)), prefill(runner_of(scaled_path, FP8))
    factors = torch.tensor([4.0, 0.25]).view(1, 1, 2, 1, 1)
    assert torch.equal(scaled[:, 0], (plain[:, 0] / factors).to(FP8).float())
    spec = SampleSpec(0.0, 0, 1.0, 0, 0, 5)
    plan = StepPlan([ScheduledChunk([301, 302, 303, 304, 305], 0, [0], spec)])
    unscaled = runner_of(path, FP8).run(plan).token_ids
    assert runner_of(scaled_path, FP8).run(plan).token_ids == unscaled
    assert runner_of(scaled_path, torch.float32).run(plan).token_ids == unscaled, "scales are for FP8 alone"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("scale", "message"), [(torch.tensor(-1.0), "is -1.0; a scale"), (torch.ones(4), r"has shape \[4\]; a scale")]
)
def test_what_is_no_scale_is_named(tiny_llama: Path, tmp_path: Path, scale: Tensor, message: str) -> None:
    path = with_scales(tiny_llama, tmp_path / "m", {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(CheckpointError, match=f"model.layers.1.self_attn.k_scale {message}"):
        runner_of(path, FP8)


def test_large_numbers_are_stored_as_the_largest() -> None:
    from splitserve.kernels.reference.operations import kv_write

    cache = torch.zeros(1, 1, 2, 4, 8, dtype=FP8)
    kv_write(cache, torch.full((1, 1, 8), 1e6), torch.full((1, 1, 8), -1e6), torch.tensor([[2]]))
    assert cache[0, 0, 0, 2].float().tolist() == [448.0] * 8
    assert cache[0, 0, 1, 2].float().tolist() == [-448.0] * 8


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'"):
        EngineConfig(model="m", kv_cache_dtype="int4")


@pytest.mark.slow
def test_a_hand_over_moves_it_as_it_is(tiny_qwen3: Path) -> None:
    """Decode goes on from the same bytes: the tokens of a mixed worker, between different numbers of ranks, too."""
    prompts = [[300 + (7 * index + 3 * i) % 900 for i in range(length)] for index, length in enumerate((17, 40, 150))]
    bodies = greedy_bodies(tiny_qwen3.name, prompts, 8)
    engine = EngineConfig(
        model=str(tiny_qwen3),
        dtype="float32",
        device="cpu",
        kv_cache_dtype="fp8",
        kv_memory_bytes=16 << 20,
        max_num_seqs=8,
        threads=1,
    )
    tokens = []
    for workers in ({"num_mixed": 1}, {"num_prefill": 1, "num_decode": 1, "prefill_tp": 2}):
        with LocalCluster(simple_spec(engine, port=0, **workers), log_level="warning") as running:
            answers = complete_all(running.url, bodies, at_once=False)
            assert [answer["status"] for answer in answers] == [200] * 3, answers
            tokens.append([answer["choices"][0]["token_ids"] for answer in answers])
            metrics = wait_until_quiet(running.url)
            if "num_decode" in workers:
                assert all(answer["splitserve"]["mode"] == "disaggregated" for answer in answers)
                # A token takes 4 layers, 4 heads, keys and values of 32 bytes.
                moved = metrics["decode-0"]["handover_bytes_total"]
                assert 0 < moved <= sum(-(-len(prompt) // 16) * 16 for prompt in prompts) * 4 * 4 * 2 * 32
    assert tokens[0] == tokens[1]


@pytest.mark.on_gpu
def test_triton_attention_reads_it() -> None:
    """A decode token and a chunk over FP8 blocks: what the same kernel makes of the same numbers, converted before."""
    pytest.importorskip("triton")
    from splitserve.kernels.triton.attention.paged import TritonPagedAttention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter mixes up narrow products
    shape = AttentionShape(4, 2, 64, 16, 2, dtype, device)
    cache = torch.randn(5, 2, 2, 2, 16, 64, generator=torch.Generator().manual_seed(0)).to(FP8).to(device)
    batch = PagedBatch([1, 5], [35, 18], [[3, 0, 4], [1, 2]])
    query = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    answers = []
    for kv_cache in (cache, cache.to(dtype)):
        attention = TritonPagedAttention(shape)
        answers.append(attention.run(query, kv_cache[:, 1], attention.plan(batch)))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)
