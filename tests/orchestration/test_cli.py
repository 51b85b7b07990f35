"""The command line: options to configs, refusals, errors in one line; the display beneath it."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.cli.demo import ChatResult, DemoError, check_disaggregated, describe_result
from splitserve.orchestration.cli.display import describe_progress
from splitserve.orchestration.cli.options import add_engine_options, cluster_spec
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.spec.cluster_spec import API_KEY_VARIABLE, ClusterSpec
from splitserve.orchestration.spec.document import to_yaml
from splitserve.orchestration.spec.expansion import Secrets, resolve_secrets, router_config, worker_config, worker_names
from splitserve.orchestration.spec.model_source import check_model_directory
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.request import Role

BENCHMARK_PAGES = Path(__file__).parents[2] / "docs" / "benchmarks"
USER_BENCHES = {"serve", "goodput", "twin", "compare", "isolation", "handover"}


def spec_of(*arguments: str) -> ClusterSpec:
    return cluster_spec(cli.build_parser().parse_args(["serve", "/dir/my-model", *arguments]))


# ---- options ----


def test_defaults_are_those_of_the_config() -> None:
    spec = spec_of("--mixed", "1")
    config = EngineConfig(model="/dir/my-model", served_model_name="my-model")
    assert spec.engine_config(spec.pools[0]) == config
    assert spec.served_model_name == "my-model"
    assert (spec.router.host, spec.router.port, spec.router.policy) == ("127.0.0.1", 8000, "cost")


def test_options_reach_the_configs_of_all_processes() -> None:
    spec = spec_of(
        *("--prefill", "2", "--decode", "1", "--port", "0", "--served-model-name", "m", "--dtype", "bfloat16"),
        *("--block-size", "32", "--kv-memory", "1.5g", "--max-batched-tokens", "2048", "--max-num-seqs", "8"),
        *("--max-model-len", "4096", "--no-enable-prefix-caching", "--seed", "7", "--load-format", "dummy"),
        *("--max-prefill-tokens-beside-decode", "128"),
    )
    pools = worker_names(spec)
    assert {name: pool.role for name, pool in pools.items()} == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
    }
    where = {"membership": "tcp://127.0.0.1:5", "host": "127.0.0.1"}
    worker = worker_config(spec, pools["decode-0"], "decode-0", Secrets(), threads=3, **where)
    assert (worker.engine_id, worker.role, worker.membership) == ("decode-0", Role.DECODE, "tcp://127.0.0.1:5")
    assert worker.engine == EngineConfig(
        model="/dir/my-model",
        served_model_name="m",
        dtype="bfloat16",
        load_format="dummy",
        block_size=32,
        kv_memory_bytes=3 * 2**29,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_prefill_tokens_beside_decode=128,
        max_num_seqs=8,
        enable_prefix_caching=False,
        threads=3,
        seed=7,
    )
    router = router_config(spec, Secrets(), "127.0.0.1")
    assert (router.model, router.served_model_name, router.port) == ("/dir/my-model", "m", 0)


def test_vllm_names_are_aliases() -> None:
    ours = spec_of("--mixed", "1", "--kv-memory", "1GiB", "--max-batched-tokens", "100")
    theirs = spec_of("--mixed", "1", "--kv-cache-memory-bytes", "1GiB", "--max-num-batched-tokens", "100")
    assert ours == theirs


def test_threads_can_be_chosen() -> None:
    assert [pool.threads for pool in spec_of("--mixed", "3", "--threads", "2").pools] == [2]


def test_every_engine_option_reaches_the_engine() -> None:
    """Also those that are added one day."""
    flags = {
        "--dtype": "float16",
        "--device": "cpu",
        "--load-format": "dummy",
        "--attention-backend": "reference",
        "--kv-keep": "prompt",
        "--disk-kv-backend": "gds",
        "--lmcache": "tcp://127.0.0.1:5555",
        "--tensor-parallel-size": "2",
        "--kv-cache-dtype": "fp8",
        "--expert-parallel": "on",
        "--model-backend": "native",
    }
    needs = {"--disk-kv-size": ["--disk-kv-dir", "/kv"], "--disk-kv-backend": ["--disk-kv-dir", "/kv"]}
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    for action in parser._actions[1:]:
        flag = action.option_strings[-1 if action.default is True else 0]  # of a pair, the second one says no
        value = [] if action.nargs == 0 else [flags.get(flag, "0.5" if "utilization" in flag else "77")]
        options = cli.build_parser().parse_args(["serve", "m", "--mixed", "1", flag, *value, *needs.get(flag, [])])
        spec = cluster_spec(options)
        config = spec.engine_config(spec.pools[0])
        assert getattr(config, action.dest) == getattr(options, action.dest) != action.default, flag


@pytest.mark.skipif(not BENCHMARK_PAGES.is_dir(), reason="not a checkout")
def test_each_bench_is_on_one_page_of_the_documentation() -> None:
    pages = [(BENCHMARK_PAGES / name).read_text() for name in ("index.md", "developers.md")]
    users, developers = (re.findall(r"^\| `splitserve bench ([\w-]+)` \|", page, re.MULTILINE) for page in pages)
    assert set(users) == USER_BENCHES
    assert sorted(users + developers) == sorted(cli.BENCHES)


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "splitserve.orchestration.cli.main", "spec", "schema"]
    done = subprocess.run(command, check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == cli.EXIT_BROKEN_PIPE and not done.stderr


def test_a_negative_number_of_lines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["logs", "-n", "-4"])
    assert "must be a whole number between 0 and 2147483648, got '-4'" in capsys.readouterr().err


def test_help_shows_defaults_that_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 16.00 GiB)" in text and "(default: 8000)" in text
    assert "(default: )" not in text and "default: None" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "1"], "no decode worker.*--decode N"),
        (["--decode", "2"], "no prefill worker.*--prefill N"),
        (["--mixed", "1", "--block-size", "-1"], "--block-size: must be between 0 and 4096, got -1"),
        (["--mixed", "1", "--max-prefill-tokens-beside-decode", "-1"], "--max-prefill-tokens-beside-decode: must be"),
        (
            ["--mixed", "1", "--max-batched-tokens", "4", "--max-num-seqs", "5"],
            r"--max-batched-tokens: \(4\) is smaller than max_num_seqs",
        ),
        (["--mixed", "1", "--max-num-seqs", "10000000"], "--max-num-seqs: must be between 0 and 65536, got 10000000"),
        (["--mixed", "1", "--threads", "100000"], "--threads: must be between 0 and 4096, got 100000"),
        (["--mixed", "1", "--read-threads", "100000"], "--read-threads: must be between 0 and 256, got 100000"),
        (["--mixed", "1", "--max-model-len", "1"], "--max-model-len: must be at least 2"),
        (["--mixed", "1", "--kv-load-seconds", "0"], "--kv-load-seconds: must be more than 0 and at most 86400, got 0"),
        (["--mixed", "1", "--kv-load-seconds", "1e300"], "--kv-load-seconds: must be more than 0 and at most 86400"),
        (["--mixed", "1", "--seed", "9" * 30], "--seed: must be between 0 and 9223372036854775807"),
        (
            ["--mixed", "1", "--gpu-memory-utilization", "1.5"],
            "memory-utilization: must be more than 0 and at most 1, got 1.5",
        ),
    ],
)
def test_nonsense_is_refused_with_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(*arguments)


def test_model_directory_is_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory: /no/where"):
        check_model_directory("/no/where")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        check_model_directory(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model_directory(str(tmp_path))


def test_errors_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["serve", str(tmp_path), "--mixed", "1", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("splitserve: error: ") and error.count("\n") == 1
    assert cli.main(["demo-model", str(tmp_path / "m"), "--shape", "huge"]) == 2
    assert "shape is 'huge'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", str(tmp_path), "--mixed", "1", "--kv-memory", "3x"])
    assert "write it like 512MiB" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "nothing"])
    assert "there is no 'nothing'; choose one of serve, handover" in capsys.readouterr().err


def test_bench_hands_over_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "serve", "--help"])
    assert "--request-rate" in capsys.readouterr().out
    assert cli.main(["bench", "serve", "--model", "m", "--slo", "fast"]) == 2
    assert "SLO 'fast'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("splitserve 0.")


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "tokenizers", "numpy", "fastapi", "zmq", "aiohttp"}
    program = f"import splitserve.orchestration.cli.main, sys; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---- what people see ----


@pytest.mark.parametrize(
    ("stage", "detail", "line"),
    [
        (
            "weights",
            {"seconds": "1.23", "bytes": "2147483648", "dtype": "float32"},
            "weights    2.00 GiB, float32, 1.2 s",
        ),
        (
            "kv_memory",
            {"blocks": "4096", "bytes": "268435456", "tokens": "65536"},
            "KV memory  4,096 blocks, 65,536 tokens, 256.0 MiB",
        ),
        ("ready", {"threads": "2", "endpoint": "tcp://x"}, "ready      2 threads"),
        ("listening", {"url": "http://x"}, "listening  http://x"),
        (
            "down",
            {"reason": "ended with status 1"},
            "down       its server ended with status 1, and is started again; `splitserve logs` shows why",
        ),
        ("compiled", {"graphs": "3"}, "compiled   graphs 3"),
    ],
)
def test_progress_lines(stage: str, detail: dict[str, str], line: str) -> None:
    assert describe_progress(ChildProgress("decode-0", stage, detail)) == f"  decode-0   {line}"


def test_internal_stages_are_not_shown() -> None:
    assert describe_progress(ChildProgress("router", "membership", {"endpoint": "tcp://x"})) is None


def demo_result(**route: object) -> ChatResult:
    handover = {"blocks": 3, "bytes": 3072, "reads": 1, "transport": "nixl", "seconds": 0.002, "exposed_seconds": 0.001}
    usage = {"prompt_tokens": 40, "completion_tokens": 3}
    defaults = {"mode": "disaggregated", "prefill": "prefill-0", "decode": "decode-0", "handover": handover}
    return ChatResult([10.1, 10.2, 10.3], defaults | route, usage)


def test_demo_reports_where_things_ran() -> None:
    text = describe_result(demo_result(), 10.0)
    for part in ("prefill-0: 40 prompt tokens", "decode-0: 3 tokens", "3 KV blocks, 3.0 KiB", "over nixl", "2.00 ms"):
        assert part in text
    check_disaggregated(demo_result())


@pytest.mark.parametrize(
    "route", [{"mode": "local"}, {"decode": "prefill-0"}, {"handover": None}, {"handover": {"blocks": 0}}]
)
def test_demo_fails_unless_really_disaggregated(route: dict[str, object]) -> None:
    with pytest.raises(DemoError, match=r"disaggregated|no KV block"):
        check_disaggregated(demo_result(**route))


# ---- the API key ----


def test_a_key_on_the_command_line_reaches_the_processes_with_a_warning(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "")  # so that the variable is as it was after the test
    spec = spec_of("--mixed", "1", "--api-key", "sk-1")
    assert resolve_secrets(spec).api_key == "sk-1" and "sk-1" not in to_yaml(spec)
    assert "list of processes" in caplog.text and "sk-1" not in caplog.text
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match="--api-key: there is a reference to a key already"):
        spec_of("--mixed", "1", "--api-key", "sk-1", "--api-key-file", str(tmp_path / "key"))
    assert not os.environ[API_KEY_VARIABLE]


def test_options_of_the_served_model_reach_the_router(tmp_path) -> None:
    spec = spec_of(
        *("--mixed", "1", "--served-model-name", "a", "b", "--served-model-name", "c", "--generation-config", "none"),
        *("--chat-template", str(tmp_path / "t.jinja"), "--allowed-origins", "https://a.example", "http://b:8080"),
    )
    router = router_config(spec, Secrets(), "127.0.0.1")
    assert (router.served_model_name, router.aliases) == ("a", ["b", "c"])
    assert (router.generation_config, router.chat_template) == ("none", str(tmp_path / "t.jinja"))
    assert router.allowed_origins == ["https://a.example", "http://b:8080"]
    with pytest.raises(ConfigError, match=r"--allowed-origins: must be like https://app\.example\.com"):
        spec_of("--mixed", "1", "--allowed-origins", "app.example.com/page")
    with pytest.raises(ConfigError, match="it goes before options that take several values"):
        cluster_spec(cli.build_parser().parse_args(["serve", "--mixed", "1", "--served-model-name", "a", "/dir"]))
