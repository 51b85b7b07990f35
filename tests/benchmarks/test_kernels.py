"""bench kernels and bench layout on a CPU: what they measure is what they say, and every operation is measured."""

import json
from pathlib import Path

import pytest
import torch

from splitserve.benchmarks.kernels import kernels, layout
from splitserve.benchmarks.kernels.case import Target
from splitserve.benchmarks.kernels.cases import cases
from splitserve.benchmarks.kernels.device_timing import relative_error
from splitserve.benchmarks.kernels.kv_cases import shuffled_batch
from splitserve.benchmarks.kernels.layout import Side, sides, single_head_sides
from splitserve.common.errors import ConfigError
from splitserve.kernels.api import AttentionShape
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.models.demo.checkpoint import shape_config
from splitserve.models.step_costs import attended_pairs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--block-size", "4"]


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--operation", "rms_norm", "pack_linear", "gather_kv", "--rows", "4"]
    assert kernels.main([*ON_CPU, "--result-dir", str(tmp_path), *options]) == 0
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content["bench"] == "kernels" and content["ceilings"]["copy_bytes_per_second"] > 0
    figures = content["figures"]["tiny"]
    assert {figure["operation"] for figure in figures} == {"rms_norm", "pack_linear", "gather_kv"}
    references = [figure for figure in figures if figure["backend"] == "reference"]
    assert all(figure["ratio"] == 1 and figure["error"] == 0 for figure in references)
    others = [figure for figure in figures if figure["backend"] == "onednn"]
    assert len(others) == 5 and all(figure["error"] < 1e-4 and figure["us"] > 0 for figure in others)
    assert "onednn" in capsys.readouterr().out


def test_defaults_are_small_on_a_cpu() -> None:
    on_cpu, on_gpu = kernels._parse(["--device", "cpu"]), kernels._parse([])
    assert (on_cpu.shape, on_cpu.rows, on_cpu.context, on_cpu.dtype) == (["tiny"], [1, 16, 64], 256, "float32")
    assert on_gpu.shape == ["llama-3.1-8b", "qwen3-8b"] and max(on_gpu.rows) == 8192 and on_gpu.dtype == "bfloat16"
    assert kernels._parse(["--device", "cpu", "--rows", "4"]).rows == [4]


def test_every_operation_has_cases() -> None:
    target = Target(shape_config("tiny"), torch.float32, CPU, 4, 9)
    reference = select_kernels(CPU, torch.float32)
    seen = set()
    for case in cases(target, 5, OPERATIONS):
        seen.add(case.operation)
        assert case.num_bytes > 0 and case.rows in (4, 5)
        calls = case.make_calls(reference)
        first, again = calls[0]().clone(), case.make_calls(reference)[0]()
        assert relative_error(again, first) == 0, "calls are made on equal inputs"
        for call in calls[1:]:
            call()
    assert seen == set(OPERATIONS)


def test_layout(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--batch", "2", "--context", "5", "8", "--prefill", "9"]
    assert layout.main([*ON_CPU, "--result-dir", str(tmp_path), *options]) == 0
    (path,) = tmp_path.iterdir()
    figures = json.loads(path.read_text())["figures"]
    assert [(figure["phase"], figure["batch"], figure["context"]) for figure in figures] == [
        ("decode", 2, 5),
        ("decode", 2, 8),
        ("prompt", 1, 9),
    ]
    assert all(figure["difference"] == 0 and figure["ratio"] > 0 for figure in figures)


@pytest.mark.parametrize("lengths", [[(1, 9)] * 3, [(7, 7)]])
def test_all_layouts_hold_the_same_content(lengths: list[tuple[int, int]]) -> None:
    """Also with heads outside layers: each layer's answer is that of our blocks, its heads regrouped."""
    shape = AttentionShape(6, 2, 8, 4, 3, torch.float32, CPU)
    batch = shuffled_batch(lengths, 4)
    ours = torch.randn(sum(len(table) for table in batch.block_tables), 3, 2, 2, 4, 8)
    query = torch.randn(sum(query_len for query_len, _ in lengths), 6, 8)
    kernels = select_kernels(CPU, torch.float32)

    def answers(side: Side) -> list[torch.Tensor]:
        return [call() for call in side.calls(kernels)]

    plain, blocks = (answers(side) for side in sides(shape, batch, query, ours))
    single, outside = single_head_sides(shape, batch, query, ours)
    strides = outside.layers[0].stride()
    assert strides[0] == 3 * 2 * 4 * 8 and single.layers[0].is_contiguous() and len(outside.layers) == 3
    num_seqs = len(lengths)
    for index in range(3):
        expected = plain[index].view(num_seqs, -1, 2, 3, 8).transpose(1, 2).reshape(-1, 3, 8)
        torch.testing.assert_close(blocks[index], plain[index])
        for side in (single, outside):
            torch.testing.assert_close(answers(side)[index], expected)


def test_counts() -> None:
    assert [attended_pairs(1, 9), attended_pairs(4, 4), attended_pairs(2, 5)] == [9, 10, 9]
    batch = shuffled_batch([(1, 9), (2, 4)], 4)
    assert [len(table) for table in batch.block_tables] == [3, 1]
    assert sorted(block for table in batch.block_tables for block in table) == [0, 1, 2, 3]


def test_relative_error() -> None:
    x = torch.tensor([3.0, -4.0])
    assert relative_error(x, x) == 0
    assert relative_error(x + torch.tensor([0.0, 1.0]), x) == pytest.approx(0.2)
    one_wrong = torch.ones(1000)
    one_wrong[7] = 4
    assert relative_error(one_wrong, torch.ones(1000)) == pytest.approx(0.3)
    assert relative_error(torch.full((2,), float("nan")), x) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (layout.main, [*ON_CPU, "--backend", "magic"], "attention has no backend 'magic'"),
        (layout.main, [*ON_CPU, "--backend", "triton"], "can't run on triton: "),
    ],
)
def test_wrong_backends(main, options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
@pytest.mark.parametrize("main", [kernels.main, layout.main])
def test_without_a_gpu_they_say_so(main) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        main([])


@pytest.mark.parametrize(
    "options", [["--rows", "0"], ["--rows", "x"], ["--operation", "magic"], ["--block-size", "-1"]]
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(options)
    assert options[0] in capsys.readouterr().err
