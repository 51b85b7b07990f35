"""Keyword arguments of the Python interface: the options of the command line under other names, refused alike."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import splitserve
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.main import build_parser
from splitserve.orchestration.cli.options import cluster_spec
from splitserve.orchestration.python.keywords import spec_of
from splitserve.orchestration.python.llm import LLM
from splitserve.orchestration.python.server import launch
from splitserve.orchestration.spec.cluster_spec import ClusterSpec

NO_POOLS = {"prefill": 0, "decode": 0, "mixed": 0}
PD = {"prefill": 1, "decode": 1, "mixed": 0}


def options(*arguments: str) -> ClusterSpec:
    """The spec that `splitserve serve` makes of these arguments."""
    return cluster_spec(build_parser().parse_args(["serve", *arguments]))


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, []),
        ({"kv_memory": "64MiB"}, ["--kv-memory", "64MiB"]),
        ({"kv_memory": 64 << 20}, ["--kv-memory", "64MiB"]),
        ({"max_model_len": 128, "max_num_seqs": 3}, ["--max-model-len", "128", "--max-num-seqs", "3"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"enable_prefix_caching": True}, []),
        ({"verify_kv": True}, ["--verify-kv"]),
        ({"verify_kv": False}, []),
        ({"device": "cpu", "dtype": "float32"}, ["--device", "cpu", "--dtype", "float32"]),
        ({"served_model_name": "one"}, ["--served-model-name", "one"]),
        ({"served_model_name": ["one", "two"]}, ["--served-model-name", "one", "two"]),
        ({"kv_load_seconds": 2.5}, ["--kv-load-seconds", "2.5"]),
        ({"max_model_len": None}, []),
    ],
)
def test_settings_are_the_options_of_serve(tiny_qwen3: Path, settings: dict[str, Any], arguments: list[str]) -> None:
    model = str(tiny_qwen3)
    found = spec_of(tiny_qwen3, None, PD, settings)
    assert found == options(model, "--prefill", "1", "--decode", "1", "--port", "0", *arguments)


def test_without_workers_there_is_a_mixed_one_and_the_port_is_free(tiny_qwen3: Path) -> None:
    assert spec_of(tiny_qwen3, None, NO_POOLS, {}) == options(str(tiny_qwen3), "--mixed", "1", "--port", "0")
    assert spec_of(tiny_qwen3, None, NO_POOLS, {"port": 12345}).router.port == 12345


def test_a_spec_is_taken_as_it_is(tiny_qwen3: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {{path: {tiny_qwen3}, max_model_len: 99}}\npools: [{{name: all, role: mixed}}]\nrouter: {{port: 0}}\n"
    )
    assert spec_of(None, file, NO_POOLS, {}) == options("--spec", str(file))
    with pytest.raises(ConfigError, match=r"^max_num_seqs doesn't go with spec: put it into .*cluster.yaml"):
        spec_of(None, file, NO_POOLS, {"max_num_seqs": 3})
    with pytest.raises(ConfigError, match=r"^prefill doesn't go with spec"):
        spec_of(None, file, PD, {})
    file.write_text(f"model: {{path: {tiny_qwen3}}}\npools: [{{name: all, role: mixed, count: -1}}]\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:2: pools\[0\].count"):
        spec_of(None, file, NO_POOLS, {})


@pytest.mark.parametrize(
    ("pools", "settings", "problem"),
    [
        (PD, {"kv_memory": "much"}, "kv_memory: 'much' is not an amount of memory"),
        (PD, {"max_num_seqs": -1}, "max_num_seqs: must be between 0 and 65536, got -1"),
        (PD, {"max_num_seqs": "many"}, "max_num_seqs: "),
        (PD, {"device": "tpu"}, "device: there is no 'tpu'"),
        (PD, {"verify_kv": 1}, "verify_kv must be True or False, got 1"),
        (PD, {"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({**NO_POOLS, "prefill": 1}, {}, "add a decode pool (decode=N)"),
        ({**NO_POOLS, "mixed": -1}, {}, "mixed: must be a whole number between 0 and 4096, got '-1'"),
        ({**PD, "prefill": 5000}, {}, "prefill: must be a whole number between 0 and 4096, got '5000'"),
        ({**NO_POOLS, "mixed": 1}, {"prefill_tp": 2}, "prefill_tp is 2, but there are no prefill workers"),
        (PD, {"disk_kv_size": "1GiB"}, "disk_kv_size is for KV in files: say where, with disk_kv_dir"),
        (PD, {"port": 65536}, "port: "),
    ],
)
def test_errors_name_keywords(tiny_qwen3: Path, pools: dict[str, int], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        spec_of(tiny_qwen3, None, pools, settings)
    assert "--" not in str(caught.value)


def test_misspelt_settings_and_missing_models(tiny_qwen3: Path) -> None:
    with pytest.raises(TypeError, match=r"there is no setting 'kv_memry'; did you mean kv_memory"):
        LLM(tiny_qwen3, kv_memry="1GiB")  # type: ignore[call-arg]
    for wrong in ({}, {"model": tiny_qwen3, "spec": "cluster.yaml"}):
        with pytest.raises(TypeError, match=r"either a model .* or spec=FILE"):
            launch(**wrong)
    with pytest.raises(ConfigError, match=r"^model: no such directory: /nowhere"):
        launch("/nowhere")
    with pytest.raises(ConfigError, match=r"log_level must be one of debug, .*, got 'loud'"):
        launch(tiny_qwen3, log_level="loud")
    for concurrency in (0, 1025):
        with pytest.raises(ConfigError, match=f"concurrency must be between 1 and 1024, got {concurrency}"):
            LLM(tiny_qwen3, concurrency=concurrency)


def test_importing_the_package_imports_next_to_nothing() -> None:
    program = "import sys, splitserve; print(len([name for name in sys.modules if name.startswith('splitserve')]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    program = "import sys; from splitserve import LLM, launch; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_stub_has_the_names_of_the_module() -> None:
    stub = Path(splitserve.__file__).with_name("__init__.pyi").read_text()
    declared = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {name for _, name in declared} == set(splitserve._PYTHON)
    for module, name in declared:
        assert getattr(splitserve, name).__module__ == module
        assert name in dir(splitserve)
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        splitserve.LMM  # type: ignore[attr-defined] # noqa: B018
