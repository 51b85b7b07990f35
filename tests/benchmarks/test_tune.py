"""The tuner: wrong and failing candidates never win, what was found is written after each shape. Times are by a clock
that only the operation moves."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitserve.benchmarks.common.shapes import model_shape
from splitserve.benchmarks.engine.ceilings import product_shapes
from splitserve.benchmarks.kernels import device_timing
from splitserve.benchmarks.kernels.device_timing import TOLERANCE, relative_error
from splitserve.benchmarks.kernels.tune import Tuner
from splitserve.benchmarks.kernels.tune_compile import CompilePool
from splitserve.benchmarks.kernels.tune_search import Search
from splitserve.benchmarks.kernels.tune_steps import Chosen, StepResults, StepTuner
from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.parameters import Params, TunedEntry
from splitserve.kernels.tuning.tunables import OPERATIONS, TunableCase, TuneTarget, load_tunable
from splitserve.models.config import Fp8Format, load_model_config
from splitserve.models.demo.checkpoint import SHAPES
from splitserve.models.demo.published import named_config
from splitserve.models.experts import ExpertsSpec
from splitserve.orchestration.cli import main as cli
from transformers_models import write_transformers_model

CPU = torch.device("cpu")
DEVICE = "Test GPU"
TARGET = TuneTarget(SHAPES["tiny"], torch.float32, CPU, 4)
MILLISECONDS = {1: 6, 2: 3, 3: 0, 4: 9}  # of an operation whose parameter is its speed


class Clock:
    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timing, "time", CLOCK)


def sleepy_sum(x: Tensor) -> Tensor:
    """An operation with a tuned parameter: 3 gives a wrong answer, 5 can't run."""
    params = tuning.config_for("sleepy_sum", "any", x.shape[0]) or {"speed": 1}
    if params["speed"] == 5:
        raise RuntimeError("out of shared memory\nand more lines")
    CLOCK.seconds += MILLISECONDS[int(params["speed"])] * 1e-3
    return x.sum(0) + (params["speed"] == 3)


class SleepyCase:
    num_bytes = 1000
    tolerance = None

    def __init__(self, rows: int, candidates: Sequence[int], seen: list[Params]) -> None:
        self.x = torch.randn(rows, 8)
        self._candidates = candidates
        self._seen = seen

    def candidates(self, best: Params) -> list[Params]:
        self._seen.append(best)
        return [{"speed": speed} for speed in self._candidates]

    def calls(self) -> list[Callable[[], Tensor]]:
        return [lambda: sleepy_sum(self.x)] * 2

    def expected(self) -> Tensor:
        return self.x.sum(0)


class SleepyTunable:
    def __init__(self, candidates: Sequence[int]) -> None:
        self.candidates = candidates
        self.seen: list[Params] = []

    def shape_keys(self, target: TuneTarget) -> list[str]:
        return ["any", "other"]

    def case(self, target: TuneTarget, key: str, rows: int) -> SleepyCase | None:
        return SleepyCase(rows, self.candidates, self.seen) if rows < 100 else None


def test_the_fastest_right_candidate_wins() -> None:
    seen: list[Params] = []
    found = Search("sleepy_sum", SleepyCase(2, [1, 2, 3, 4, 5], seen), CPU, lambda _: None).run(2)
    assert found.params == {"speed": 2} and found.rows == 2 and found.num_tried == 6
    assert found.seconds < 0.8 * found.default_seconds
    wrong, failed = found.failures
    assert wrong.startswith("{'speed': 3}: differs from the reference by ")
    assert failed == "{'speed': 5}: out of shared memory"
    assert seen == [{}, {"speed": 2}]


def test_the_default_stays_when_nothing_is_faster() -> None:
    found = Search("sleepy_sum", SleepyCase(2, [4], []), CPU, lambda _: None).run(2)
    assert found.params == {} and found.seconds == found.default_seconds and not found.failures


def test_a_default_that_is_wrong_is_an_error() -> None:
    with tuning.forced("sleepy_sum", {"speed": 1}):
        case = SleepyCase(2, [1], [])
    case.expected = lambda: torch.zeros(8)
    with pytest.raises(ConfigError, match="sleepy_sum can't be tuned: its default fails: differs"):
        Search("sleepy_sum", case, CPU, lambda _: None).run(2)


def test_what_was_found_is_written_shape_by_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = [TunedEntry(1, {"speed": 7}), TunedEntry(8, {"speed": 8})]
    tuning.record(tmp_path, DEVICE, "sleepy_sum", "any", shipped)
    tunable = SleepyTunable([1, 2])
    done = Tuner(DEVICE, tmp_path, 1e9, CompilePool(1)).tune("sleepy_sum", tunable, TARGET, [2, 8, 2, 100], {"other"})
    assert done == {"any"}
    configs = tuning.TunedConfigs(DEVICE, [tmp_path])
    assert configs.entries("sleepy_sum", "any") == [
        TunedEntry(1, {"speed": 7}),
        TunedEntry(2, {"speed": 2}),
        TunedEntry(8, {"speed": 2}),
    ]
    printed = capsys.readouterr().out
    assert "speed=2" in printed and "100 rows don't fit" in printed and str(tmp_path / "test-gpu.json") in printed


def test_an_interruption_loses_the_current_shape_alone(tmp_path: Path) -> None:
    class Interrupted(SleepyTunable):
        def case(self, target: TuneTarget, key: str, rows: int) -> SleepyCase | None:
            if key == "other":
                raise KeyboardInterrupt
            return super().case(target, key, rows)

    with pytest.raises(KeyboardInterrupt):
        Tuner(DEVICE, tmp_path, 1e9, CompilePool(1)).tune("sleepy_sum", Interrupted([2]), TARGET, [2], set())
    assert tuning.TunedConfigs(DEVICE, [tmp_path]).entries("sleepy_sum", "any") == [TunedEntry(2, {"speed": 2})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--shape", "tiny"]) == cli.EXIT_ERROR
    assert "CUDA device, and there is none" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--rows", "0"], ["--operation", "magic"], ["--shape", "magic"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", *options])
    assert options[0] in capsys.readouterr().err


def test_shapes_of_a_checkpoint(tiny_qwen3: Path) -> None:
    assert named_config(model_shape(str(tiny_qwen3))) == load_model_config(tiny_qwen3)
    assert named_config(model_shape("llama-3.1-8b")).hidden_size == 4096
    with pytest.raises(argparse.ArgumentTypeError, match=r"one of .*gemma-3-27b.*, got '/nowhere'"):
        model_shape("/nowhere")


def test_shapes_of_a_checkpoint_without_a_family(tmp_path: Path) -> None:
    write_transformers_model(tmp_path, "BioGptForCausalLM")
    with pytest.raises(CheckpointError, match=r"BioGptForCausalLM is computed by transformers' code.*models\.md"):
        named_config(model_shape(str(tmp_path)))


@pytest.mark.parametrize(
    "architecture",
    ["ArceeForCausalLM", "Gemma2ForCausalLM", "NemotronForCausalLM", "Phi3ForCausalLM", "SeedOssForCausalLM"],
)
def test_products_to_tune_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    """MLPs with and without a gate, gates with other activations than SiLU, one tensor for several projections."""
    pytest.importorskip("triton")
    write_transformers_model(tmp_path, architecture)
    config = load_model_config(tmp_path)
    target = TuneTarget(config, torch.float32, CPU, 4)
    keys = {key for name in ("add", "norm", "gated") for key in load_tunable(f"linear_{name}").shape_keys(target)}
    assert keys == {tuning.shape_key(torch.float32, n=n, k=k) for n, k in product_shapes(config)}
    has_fused_gate = architecture in ("Phi3ForCausalLM", "SeedOssForCausalLM")
    assert bool(load_tunable("linear_gated").shape_keys(target)) == has_fused_gate


@pytest.mark.on_gpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_shard", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tunables_agree_with_their_reference(operation: str, is_shard: bool) -> None:
    """Each operation's cases run, and default and first candidate give the reference's answer."""
    pytest.importorskip("triton")
    target = replace(TARGET, is_shard=is_shard)
    if torch.cuda.is_available():
        target = TuneTarget(SHAPES["qwen3-0.6b"], torch.bfloat16, torch.device("cuda", 0), 64, is_shard=is_shard)
    tunable = load_tunable(operation)
    for key in tunable.shape_keys(target):
        case = tunable.case(target, key, 2)
        assert case is not None and case.num_bytes > 0
        expected = case.expected()
        for params in ({}, case.candidates({})[0]):
            with tuning.forced(operation, params):
                assert relative_error(case.calls()[0](), expected) <= TOLERANCE[target.dtype]


@pytest.mark.on_gpu
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stored", ["plain", "shared", "mxfp4", "fp8"])
def test_experts_agree_with_their_reference(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # as in workers; the interpreter's is wrong
    shared_size = 256 if stored == "shared" else 0
    experts = ExpertsSpec(RouterSpec(4, 2), 128, is_mxfp4=stored == "mxfp4", shared_size=shared_size)
    model = replace(SHAPES["tiny"], experts=experts, fp8=Fp8Format((128, 128)) if stored == "fp8" else None)
    if device.type == "cpu":
        monkeypatch.setattr("splitserve.kernels.experts.tunable.fp8_unavailable_reason", lambda _device, _dtype: None)
    target = TuneTarget(model, dtype, device, 4)
    tunable = load_tunable("experts")
    (key,) = tunable.shape_keys(target)
    name = {"mxfp4": "uint8", "fp8": "float8_e4m3fn"}.get(stored, str(dtype).removeprefix("torch."))
    assert key == f"{name} experts=4 top_k=2 hidden=128 inner=128"
    case = tunable.case(target, key, 1 if shared_size else 2)
    assert case is not None
    expected = case.expected()
    for params in ({}, case.candidates({})[1]):
        with tuning.forced("experts", params):
            assert relative_error(case.calls()[0](), expected) <= (case.tolerance or TOLERANCE[dtype])


def test_bytes_of_a_shared_expert_count() -> None:
    pytest.importorskip("triton")
    tunable, counts = load_tunable("experts"), []
    for shared_size in (0, 256):
        model = replace(SHAPES["tiny"], experts=ExpertsSpec(RouterSpec(2, 2), 128, shared_size=shared_size))
        target = TuneTarget(model, torch.bfloat16, torch.device("cpu"), 4)
        case = tunable.case(target, *tunable.shape_keys(target), 1)
        assert case is not None
        counts.append(case.num_bytes)
    assert counts[1] - counts[0] == 3 * 128 * 256 * 2


def test_search_for_experts_in_mxfp4_starts_from_tiles_of_each_kernel() -> None:
    """A start that doesn't fit would be left out without a word, and its neighbours with it."""
    pytest.importorskip("triton")
    model = replace(SHAPES["tiny"], experts=ExpertsSpec(RouterSpec(4, 2), 128, is_mxfp4=True))
    tunable, target = load_tunable("experts"), TuneTarget(model, torch.bfloat16, torch.device("cpu"), 4)
    (key,) = tunable.shape_keys(target)
    case = tunable.case(target, key, 2)
    assert case is not None
    assert {params["block_m"] for params in case.candidates({})} >= {1, 8, 16, 32}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter, which needs tiny shapes")
def test_candidates_are_compiled_by_processes_that_survive_bad_ones() -> None:
    pytest.importorskip("triton")
    key = load_tunable("linear_add").shape_keys(TARGET)[0]
    with CompilePool(2) as pool:
        for _ in range(2):  # the second time needs processes that are still there
            pool.compile("linear_add", TARGET, key, 2, [{"no_such": 1}, {"block_m": 0}])


class PairedCase(SleepyCase):
    """A case of whatever operation, whose calls read that operation's parameters."""

    def __init__(self, operation: str, rows: int) -> None:
        super().__init__(rows, [], [])
        self._operation = operation

    def calls(self) -> list[Callable[[], Tensor]]:
        if (tuning.config_for(self._operation, "any", len(self.x)) or {}).get("speed") == 3:
            return [lambda: self.x.sum(0) + 1]
        return [lambda: self.x.sum(0)]


class Paired:
    def __init__(self, operation: str) -> None:
        self._operation = operation

    def shape_keys(self, target: TuneTarget) -> list[str]:
        return ["any"]

    def case(self, target: TuneTarget, key: str, rows: int) -> PairedCase:
        return PairedCase(self._operation, rows)


def test_in_steps_parameters_are_chosen_by_what_they_do_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``first`` with speed 2 is the fastest alone, but slows ``second`` down; speed 3 of it would be the fastest of all
    and has wrong answers."""
    for operation in ("first", "second"):
        entries = [TunedEntry(rows, {"speed": speed}) for rows, speed in ((1, 3), (8, 2), (64, 4))]
        tuning.record(tmp_path, DEVICE, operation, "any", entries)
    known = tuning.TunedConfigs(DEVICE, [tmp_path])
    alone = {1: 3.0, 2: 1.0, 3: 0.5, 4: 2.0}

    def seconds(rows: int) -> float:
        speeds = [(tuning.config_for(name, "any", rows) or {"speed": 1})["speed"] for name in ("first", "second")]
        return sum(alone[int(speed)] for speed in speeds) + 2.0 * (speeds[0] == 2)

    tuner = StepTuner(known, {name: Paired(name) for name in ("first", "second")}, TARGET, seconds)
    chosen = tuner.choose(8)
    assert chosen.seconds_before == 4.0 and chosen.seconds == 3.0
    assert chosen.params == {("first", "any"): {"speed": 4}, ("second", "any"): {"speed": 2}}
    assert chosen.changed == {("first", "any")}
    printed = capsys.readouterr().out
    assert "first any, {'speed': 3}: differs from the reference" in printed
    assert "4000.000 ms a step, now 3000.000" in printed
    assert tuner.choose(8) == chosen and tuner.choose(64).changed == {("second", "any")}
    searched: list[tuple[str, str, int]] = []

    def fastest_alone(operation: str, key: str, rows: int, case: TunableCase) -> list[Params]:
        searched.append((operation, key, rows))
        return [{"speed": 4}, {"speed": 5}]

    alone[5] = 0.25
    tuner = StepTuner(known, {name: Paired(name) for name in ("first", "second")}, TARGET, seconds, fastest_alone)
    assert tuner.choose(8).params == {(name, "any"): {"speed": 5} for name in ("first", "second")}
    assert searched == [("first", "any", 8), ("second", "any", 8)]


def test_what_steps_leave_as_it_is_stays_beside_what_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry applies to fewer rows as well: those that were measured keep what they have, a default or what another
    device with the same chip has."""
    monkeypatch.setattr(tuning, "SHIPPED_DIRECTORY", tmp_path / "shipped")
    monkeypatch.setattr(tuning, "current_chip", lambda: "a chip")
    entries = [TunedEntry(rows, {"speed": rows}) for rows in (2, 16, 64)]
    tuning.record(tmp_path / "shipped", "Sister GPU", "first", "any", entries, chip_name="a chip")
    place, other, untouched = ("first", "any"), ("second", "any"), ("third", "any")
    results = StepResults(tmp_path, DEVICE)
    results.add(Chosen(1, 1.0, 1.0, {place: {}, other: {}, untouched: {}}, frozenset()))
    assert not list(tmp_path.glob("*.json"))
    results.add(Chosen(8, 2.0, 1.0, {place: {"speed": 9}, other: {}, untouched: {}}, frozenset([place])))
    results.add(Chosen(32, 2.0, 1.0, {place: {"speed": 64}, other: {"speed": 3}, untouched: {}}, frozenset([other])))
    configs = tuning.TunedConfigs(DEVICE, [tmp_path, tmp_path / "shipped"], "a chip")
    found = {rows: configs.find(*place, rows) for rows in (1, 2, 8, 16, 32, 64)}
    assert found == {1: {}, 2: {"speed": 2}, 8: {"speed": 9}, 16: {"speed": 16}, 32: {"speed": 64}, 64: {"speed": 64}}
    assert [configs.find(*other, rows) for rows in (1, 8, 32)] == [{}, {}, {"speed": 3}]
    assert configs.find(*untouched, 1) is None


def test_steps_are_those_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--in-steps", "--tensor-parallel-size", "2"])
    assert "--in-steps times the steps of one rank" in capsys.readouterr().err
