"""Tuned configurations: which one applies, files that can't be used, atomic updates, one tuner at a time."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.tuning import parameters as tuning
from splitserve.kernels.tuning.decode_launch import DecodeLaunch, decode_key, decode_launch
from splitserve.kernels.tuning.linear_launch import launch_params
from splitserve.kernels.tuning.parameters import TunedConfigs, TunedEntry, TuningError

DEVICE = "Test GPU (80GB) v1.0"
SHAPE = "bfloat16 n=6144 k=4096"


def entry(max_rows: int, **params: tuning.Param) -> TunedEntry:
    return TunedEntry(max_rows, params)


def own_and_shipped(tmp_path: Path) -> list[Path]:
    return [tmp_path / "own", tmp_path / "shipped"]


def test_names() -> None:
    assert tuning.shape_key(torch.bfloat16, n=6144, k=4096) == SHAPE
    assert tuning.device_slug("NVIDIA H200") == "nvidia-h200"
    assert tuning.device_slug(DEVICE) == "test-gpu-80gb-v1-0"


def test_the_first_entry_with_enough_rows_applies(tmp_path: Path) -> None:
    tuning.record(tmp_path, DEVICE, "linear", SHAPE, [entry(64, tile=128), entry(1, tile=16), entry(8, tile=32)])
    configs = TunedConfigs(DEVICE, [tmp_path])
    found = [configs.find("linear", SHAPE, rows) for rows in (1, 2, 8, 9, 64)]
    assert [params and params["tile"] for params in found] == [16, 32, 32, 128, 128]
    assert configs.find("linear", SHAPE, 65) is None
    assert configs.find("linear", "bfloat16 n=1 k=1", 1) is None
    assert configs.find("other", SHAPE, 1) is None
    assert TunedConfigs("Another GPU", [tmp_path]).find("linear", SHAPE, 1) is None


def test_the_users_file_wins_one_shape_at_a_time(tmp_path: Path) -> None:
    own, shipped = own_and_shipped(tmp_path)
    tuning.record(shipped, DEVICE, "linear", SHAPE, [entry(8, tile=1), entry(16, tile=2)])
    tuning.record(shipped, DEVICE, "linear", "other", [entry(8, tile=3)])
    tuning.record(own, DEVICE, "linear", SHAPE, [entry(8, tile=4)])
    configs = TunedConfigs(DEVICE, [own, shipped])
    assert configs.find("linear", SHAPE, 8) == {"tile": 4}
    assert configs.find("linear", SHAPE, 16) is None
    assert configs.find("linear", "other", 8) == {"tile": 3}


def test_a_device_with_the_same_chip_fills_the_gaps(tmp_path: Path) -> None:
    for name, tile, chip in ((DEVICE, 1, "9.0, 132"), ("Sibling", 2, "9.0, 132"), ("Stranger", 3, "9.0, 78")):
        tuning.record(tmp_path, name, "linear", SHAPE, [entry(8 * tile, tile=tile)], chip_name=chip)
    tuning.record(tmp_path, "Sibling", "linear", "other", [entry(8, tile=4)])
    configs = TunedConfigs(DEVICE, [tmp_path], "9.0, 132")
    found = [configs.find("linear", SHAPE, rows) for rows in (8, 9, 16, 17)]
    assert [params and params["tile"] for params in found] == [1, 2, 2, None]
    assert configs.find("linear", "other", 8) == {"tile": 4}
    assert TunedConfigs(DEVICE, [tmp_path]).find("linear", "other", 8) is None
    assert [each.max_rows for each in configs.entries("linear", SHAPE)] == [8]


def test_h100_and_h200_have_the_same_chip() -> None:
    files = [tuning.load(path) for path in sorted(tuning.SHIPPED_DIRECTORY.glob("*.json"))]
    assert {file.device: file.chip for file in files if file} == dict.fromkeys(
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), "9.0, 132 multiprocessors"
    )
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    assert tuning.chip(properties) == "9.0, 132 multiprocessors"


def test_recording_keeps_what_else_is_there(tmp_path: Path) -> None:
    params: dict[str, tuning.Param] = {"tile": 64, "order": "nk", "persistent": True}
    tuning.record(tmp_path, DEVICE, "linear", SHAPE, [TunedEntry(1, params)])
    path = tuning.record(tmp_path, DEVICE, "attention_decode", "x", [entry(2, parts=8)])
    tuning.record(tmp_path, DEVICE, "attention_decode", "y", [entry(2, parts=4)])
    assert path == tmp_path / "test-gpu-80gb-v1-0.json" and [path] == list(tmp_path.iterdir())
    file = tuning.load(path)
    assert file is not None and file.device == DEVICE and file.version == tuning.SCHEMA_VERSION
    assert file.operations["linear"][SHAPE] == [TunedEntry(1, params)]
    assert sorted(file.operations["attention_decode"]) == ["x", "y"]
    assert isinstance(file.operations["linear"][SHAPE][0].params["persistent"], bool)
    assert path.stat().st_mode & 0o777 == 0o644


def valid(**changes: object) -> dict[str, object]:
    shapes = {SHAPE: [{"max_rows": 1, "params": {"tile": 1}}]}
    return {"version": tuning.SCHEMA_VERSION, "device": DEVICE, "operations": {"linear": shapes}} | changes


def with_entries(*entries: dict[str, object]) -> dict[str, object]:
    return valid(operations={"linear": {SHAPE: list(entries)}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "are invalid"),
        (b"\xff{}", "are invalid"),
        (b"[1, 2]", "are invalid"),
        (json.dumps(valid())[:-9].encode(), "are invalid"),
        (valid(version=99), "schema version 99.*run 'splitserve tune' again"),
        ({"device": DEVICE, "operations": {}}, "missing required field `version`"),
        (valid(more=1), "unknown field `more`"),
        (with_entries({"max_rows": 0, "params": {}}), "max_rows is 0"),
        (with_entries({"max_rows": 1, "params": {"tile": 1.5}}), "are invalid"),
        (with_entries({"max_rows": 8, "params": {}}, {"max_rows": 8, "params": {}}), "must ascend"),
    ],
)
def test_a_file_that_cant_be_used_is_a_warning_and_defaults(
    content: bytes | dict, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, shipped = own_and_shipped(tmp_path)
    tuning.record(shipped, DEVICE, "linear", SHAPE, [entry(8, tile=7)])
    own.mkdir()
    path = own / f"{tuning.device_slug(DEVICE)}.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with caplog.at_level(logging.WARNING):
        configs = TunedConfigs(DEVICE, [own, shipped])
    assert configs.find("linear", SHAPE, 8) == {"tile": 7}
    assert len(caplog.records) == 1 and str(path) in caplog.text
    with pytest.raises(TuningError, match=says):
        tuning.load(path)
    before = path.read_bytes()
    with pytest.raises(TuningError, match=says):
        tuning.record(own, DEVICE, "linear", SHAPE, [entry(1, tile=1)])
    assert path.read_bytes() == before and [path] == list(own.iterdir())


@pytest.fixture
def on_test_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The process runs on DEVICE, with an empty user directory, which is returned."""
    monkeypatch.setenv(tuning.DIRECTORY_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(tuning, "current_device_name", lambda: DEVICE)
    tuning.forget()
    yield tmp_path / "own"
    tuning.forget()


def test_config_for_reads_once(on_test_device: Path) -> None:
    assert tuning.config_for("linear", SHAPE, 1) is None
    tuning.record(on_test_device, DEVICE, "linear", SHAPE, [entry(1, tile=5)])
    assert tuning.config_for("linear", SHAPE, 1) is None
    tuning.forget()
    assert tuning.config_for("linear", SHAPE, 1) == {"tile": 5}


def test_forced_parameters_apply_to_their_operation_alone(on_test_device: Path) -> None:
    tuning.record(on_test_device, DEVICE, "linear", SHAPE, [entry(1, tile=5)])
    tuning.forget()
    with tuning.forced("linear", {"tile": 9}):
        with tuning.forced("linear", {"tile": 10}):
            assert tuning.config_for("linear", "any", 1000) == {"tile": 10}
        assert tuning.config_for("linear", "any", 1000) == {"tile": 9}
        assert tuning.config_for("other", SHAPE, 1) is None
    assert tuning.config_for("linear", SHAPE, 1) == {"tile": 5}


def test_forced_parameters_of_one_shape_apply_to_it_alone(on_test_device: Path) -> None:
    rows, key = 5, tuning.shape_key(torch.bfloat16, n=64, k=128)
    default = launch_params("add", torch.bfloat16, 64, 128, rows)
    with tuning.forced("linear_add", {"num_warps": 8}), tuning.forced("linear_add", {"num_warps": 2}, key):
        assert launch_params("add", torch.bfloat16, 64, 128, rows).num_warps == 2
        assert launch_params("add", torch.bfloat16, 64, 256, rows).num_warps == 8
        assert launch_params("norm", torch.bfloat16, 64, 128, rows) == default
    assert launch_params("add", torch.bfloat16, 64, 128, rows) == default
    tuning.record(on_test_device, DEVICE, "linear_add", key, [entry(8, num_warps=2)])
    tuning.forget()
    assert launch_params("add", torch.bfloat16, 64, 128, rows).num_warps == 2


def test_known_parameters_are_those_of_all_rows_and_of_like_devices(tmp_path: Path) -> None:
    own, shipped = own_and_shipped(tmp_path)
    tuning.record(own, DEVICE, "linear", SHAPE, [entry(1, tile=5), entry(8, tile=6), entry(64, tile=5)], chip_name="c")
    tuning.record(shipped, "Sister", "linear", SHAPE, [entry(8, tile=7), entry(64, tile=6)], chip_name="c")
    tuning.record(shipped, "Stranger", "linear", SHAPE, [entry(8, tile=8)], chip_name="d")
    assert TunedConfigs(DEVICE, [own, shipped], "c").known("linear", SHAPE) == [{"tile": 5}, {"tile": 6}, {"tile": 7}]


def attention_shape() -> AttentionShape:
    return AttentionShape(32, 8, 128, 64, 32, torch.bfloat16, torch.device("cpu"))


def test_decode_launch(on_test_device: Path) -> None:
    shape = attention_shape()
    assert decode_key(shape) == "bfloat16 heads=32 kv_heads=8 head_dim=128 block_size=64"
    assert [decode_launch(shape, size).num_parts for size in (1, 8, 64, 72, 96, 1000)] == [64, 8, 1, 4, 2, 1]
    entries = [entry(8, num_parts=3, tile=32), entry(16, num_warps=8)]
    tuning.record(on_test_device, DEVICE, "attention_decode", decode_key(shape), entries)
    tuning.forget()
    assert decode_launch(shape, 5) == DecodeLaunch(3, 32)
    assert decode_launch(shape, 16) == DecodeLaunch(4, num_warps=8)
    assert decode_launch(shape, 17) == DecodeLaunch(3)


@pytest.mark.parametrize("params", [{"tiles": 3}, {"tile": True}, {"tile": "64"}])
def test_parameters_of_another_version_are_a_warning_and_defaults(
    params: dict, on_test_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = attention_shape()
    tuning.record(
        on_test_device, DEVICE, "attention_decode", decode_key(shape), [TunedEntry(8, {"num_parts": 2, **params})]
    )
    tuning.forget()
    tuning._warn_of_param.cache_clear()
    for _ in range(2):
        assert decode_launch(shape, 8) == DecodeLaunch(8)
    assert len(caplog.records) == 1 and "attention_decode" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_device_there_are_defaults() -> None:
    tuning.forget()
    assert tuning.config_for("linear", SHAPE, 1) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({tuning.DIRECTORY_VARIABLE: "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/splitserve/tuned"),
        ({"HOME": "/h"}, "/h/.cache/splitserve/tuned"),
    ],
)
def test_user_directory(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tuning.DIRECTORY_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tuning.user_directory() == Path(expected)


def test_one_tuner_at_a_time(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from splitserve.kernels.tuning import parameters as tuning\n"
        "with tuning.tuner_lock(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(TuningError, match=rf"pid {other.pid} holds"), tuning.tuner_lock(tmp_path):
                raise AssertionError("unreachable")
        finally:
            other.kill()  # the lock ends with its process
    with tuning.tuner_lock(tmp_path):
        assert (tmp_path / "tune.lock").read_text() == f"{os.getpid()}\n"
    with tuning.tuner_lock(tmp_path):
        pass


def test_a_directory_that_cant_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningError, match="can't read"):
        tuning.record(tmp_path / "file" / "x", DEVICE, "linear", SHAPE, [entry(1)])
    with pytest.raises(TuningError, match="--output"):
        tuning.save(tmp_path / "file" / "x.json", tuning.TunedFile(tuning.SCHEMA_VERSION, DEVICE, {}))
    with pytest.raises(TuningError, match="lock"), tuning.tuner_lock(tmp_path / "file" / "x"):
        raise AssertionError("unreachable")


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED_DIRECTORY.glob("*.json")), ids=lambda path: path.name)
def test_shipped_files_can_be_used(path: Path) -> None:
    file = tuning.load(path)
    assert file is not None and path.name == f"{tuning.device_slug(file.device)}.json" and file.operations
