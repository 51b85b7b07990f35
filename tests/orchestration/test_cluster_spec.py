"""Cluster specs: the document, its errors with their places, its schema, and the configs made of it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import json_schema, parse_spec, read_spec, schema_text, to_yaml
from splitserve.orchestration.spec.expansion import (
    Secrets,
    resolve_secrets,
    router_config,
    worker_config,
    worker_environment,
    worker_names,
)
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig

ROOT = Path(__file__).parents[2]
BASE = """\
model: {path: /models/m}
pools:
- {name: fast, role: prefill, count: 2}
- {name: slow, role: decode}
"""
FULL = """\
name: my-cluster
model:
  path: /models/Qwen3-0.6B
  served_name: qwen
  load_format: dummy
  max_model_len: 4096
  seed: 3
pools:
- name: prefill-h200
  role: prefill
  count: 2
  device: cuda
  dtype: bfloat16
  memory: {kv: 1.5GiB, host: 4GiB, gpu_utilization: 0.8}
  engine: {max_num_batched_tokens: 4096}
  nodes: {labels: {zone: a}, resources: {rack-7: 0.01}}
- name: decode
  role: decode
  dtype: bfloat16
  threads: 3
  engine: {max_num_seqs: 16}
  environment: {UCX_LOG_LEVEL: warn}
engine: {block_size: 32, max_num_batched_tokens: 512}
router: {host: 0.0.0.0, port: 9000, max_requests_in_flight: 7}
network: {interface: eth0, ip_version: 6}
connector: {transports: [tcp, cuda_ipc], devices: [eth0], verify_kv: true}
objectives: {ttft_ms: 500, tpot_ms: 30}
secrets: {shared: {env: MY_SECRET}, api_key: {file: /run/key}}
devices: {share: true}
protocol: {lease_seconds: 5, max_requests: 9}
"""


# ---- the document ----


def test_every_part_reaches_the_configs() -> None:
    spec = parse_spec(FULL)
    assert (spec.name, spec.served_model_name, spec.num_workers) == ("my-cluster", "qwen", 3)
    assert list(worker_names(spec)) == ["prefill-h200-0", "prefill-h200-1", "decode-0"]
    engine = spec.engine_config(spec.pools[0])
    common = {
        "model": "/models/Qwen3-0.6B",
        "served_model_name": "qwen",
        "load_format": "dummy",
        "max_model_len": 4096,
        "seed": 3,
        "verify_kv": True,
        "dtype": "bfloat16",
        "block_size": 32,
    }
    assert engine == EngineConfig(
        **common,
        device="cuda",
        kv_memory_bytes=3 << 29,
        host_kv_memory_bytes=4 << 30,
        gpu_memory_utilization=0.8,
        max_num_batched_tokens=4096,
    )
    where = {"membership": "tcp://[::1]:5", "host": "::1"}
    worker = worker_config(spec, spec.pools[1], "decode-0", Secrets(secret="s" * 16), threads=3, **where)
    assert worker.engine == EngineConfig(**common, max_num_batched_tokens=512, max_num_seqs=16, threads=3)
    assert worker.protocol == ProtocolConfig(lease_seconds=5, max_requests=9)
    assert (worker.host, worker.membership, worker.secret) == ("::1", "tcp://[::1]:5", "s" * 16)
    router = router_config(spec, Secrets(api_key="k"), "::1")
    assert (router.host, router.port, router.max_requests_in_flight, router.api_key) == ("0.0.0.0", 9000, 7, "k")
    assert (router.ttft_objective_ms, router.tpot_objective_ms) == (500, 30)
    assert worker_environment(spec, spec.pools[1]) == {
        "UCX_TLS": "tcp,cuda_ipc",
        "UCX_NET_DEVICES": "eth0",
        "UCX_LOG_LEVEL": "warn",
    }


@pytest.mark.parametrize("text", [BASE, FULL])
def test_what_is_written_is_read_again(text: str) -> None:
    spec = parse_spec(text)
    assert parse_spec(to_yaml(spec)) == spec


ENGINES = st.builds(
    EngineConfig,
    model=st.text("abc/", min_size=1),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    block_size=st.integers(0, 256),
    kv_memory_bytes=st.integers(0, 1 << 40),
    max_num_seqs=st.integers(1, 64),
    enable_prefix_caching=st.booleans(),
    gpu_memory_utilization=st.floats(0.01, 1.0),
    threads=st.integers(0, 64),
)


@given(ENGINES, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_options_and_document_say_the_same(engine: EngineConfig, prefill: int, decode: int, mixed: int) -> None:
    """The shorthand's spec gives the engine that it was made of, and goes through YAML unharmed."""
    spec = simple_spec(engine, num_prefill=prefill, num_decode=decode, num_mixed=mixed)
    named = msgspec.structs.replace(engine, served_model_name=spec.served_model_name)
    assert all(spec.engine_config(pool) == named for pool in spec.pools)
    assert parse_spec(to_yaml(spec)) == spec
    assert sum(1 for _ in worker_names(spec)) == prefill + decode + mixed


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ({}, {"prefill_tp": 2}, "--prefill-tp is 2, but there are no prefill workers"),
        ({}, {"decode_tp": 2}, "--decode-tp is 2, but there are no decode workers"),
        ({"disk_kv_bytes": 1 << 30}, {}, "--disk-kv-size is for KV in files"),
        ({"disk_kv_backend": "gds"}, {}, "--disk-kv-backend is for KV in files"),
    ],
)
def test_options_that_apply_to_nobody_are_refused(
    engine: dict[str, Any], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simple_spec(EngineConfig(model="/m", **engine), num_mixed=1, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "rooter: {}\n", "spec:5: rooter: there is no such setting; did you mean router?"),
        (BASE.replace("count", "cuont"), "spec:3: pools[0].cuont: there is no such setting; did you mean count?"),
        (BASE.replace("2}", "two}"), "spec:3: pools[0].count: must be a whole number, but is text"),
        (BASE.replace("2}", "-1}"), "spec:3: pools[0].count: must be a whole number >= 0, got -1"),
        (BASE.replace(", role: decode", ""), "spec:4: pools[1].role: is missing and has no default"),
        (
            BASE.replace("role: decode", "role: decoder"),
            "spec:4: pools[1].role: is 'decoder'; did you mean decode? choose one of prefill, decode, mixed",
        ),
        (BASE.replace("/models/m", "7"), "spec:1: model.path: must be text, but is a whole number; quote it"),
        (BASE + "router:\n  port: 70000\n", "spec:6: router.port: must be a whole number <= 65535, got 70000"),
        (BASE + "name: My Cluster\n", "spec:5: name: must match"),
        (BASE.replace("slow", "fast"), "spec:4: pools[1].name: is 'fast', the name of pools[0]; names must differ"),
        (BASE.replace("role: decode", "role: prefill"), "pools: 3 prefill and no decode worker"),
        (BASE.replace("role: prefill", "role: decode"), "pools: 3 decode and no prefill worker"),
        (BASE.replace("2}", "0}").replace("decode", "decode, count: 0"), "pools: no workers: raise the count"),
        (BASE + "secrets: {shared: hunter2hunter2hunter2}\n", "secrets.shared: give a reference, like {env: NAME}"),
        (BASE + "secrets: {api_key: {}}\n", "secrets.api_key: give one of env (a variable's name) and file"),
        (BASE + "engine: {max_num_seqs: -1}\n", "spec:5: engine.max_num_seqs: must be between 0 and 65536, got -1"),
        (BASE + "engine: {attention_backend: fast}\n", "engine.attention_backend: is 'fast'; choose one of auto"),
        (BASE + "protocol: {lease: 3}\n", "protocol.lease: there is no such setting; did you mean lease_seconds?"),
        (BASE + "network: {host: 10.0.0.1, interface: eth0}\n", "network: host and interface are both set"),
        (BASE + "connector: {transports: [cuda_ipc]}\n", "connector.transports: add tcp"),
        (
            BASE.replace("2}", "2, tensor_parallel_size: 2}") + "connector: {verify_kv: true}\n",
            "connector.verify_kv: compares blocks of workers of one rank, but tensor_parallel_size is 2",
        ),
        (BASE + "connector: {name: mooncake}\n", "connector.name: is 'mooncake'; choose one of nixl"),
        (BASE + "tiers: []\n", "tiers: there is no such setting"),
        (BASE + "router: {policy: best}\n", "spec:5: router.policy: is 'best'; choose one of cost"),
        (BASE + "devices: {share: maybe}\n", "spec:5: devices.share: must be true or false, but is text"),
        (
            BASE.replace("2}", "2, engine: {kv_cache_dtype: fp8}}"),
            "pools[1].engine.kv_cache_dtype: slow has auto and fast has fp8",
        ),
        (BASE.replace("2}", "2, memory: {kv: lots}}"), "pools[0].memory.kv: 'lots' is not an amount of memory"),
        (BASE.replace("2}", "2, dtype: float32}"), "pools[1].dtype: slow has auto and fast has float32"),
        (BASE.replace("2}", "2, engine: {block_size: 8}}"), "pools[1].engine.block_size: slow has none and fast has 8"),
        (
            BASE.replace("2}", "2, environment: {UCX_TLS: tcp}}"),
            "pools[0].environment.UCX_TLS: follows from other parts",
        ),
        (
            BASE.replace("2}", "2, environment: {A: 1}}"),
            "pools[0].environment.A: must be text, but is a whole number; quote it",
        ),
        (
            BASE.replace("2}", "2, affinity: {pin: false}}") + "engine: {keep_cores_awake: true}\n",
            "pools[0].affinity.pin: is off, but keep_cores_awake keeps workers on some cores",
        ),
        (
            BASE.replace("2}", "2, device: cpu}") + "engine: {keep_cores_awake: true}\n",
            "engine.keep_cores_awake: is for workers on GPUs",
        ),
        (
            BASE.replace("2}", "2, affinity: {cores: [x]}}"),
            "pools[0].affinity.cores[0]: is 'x'; write hardware threads like 0-7,16",
        ),
        (
            BASE.replace("2}", "2, affinity: {cores: [0-7, 9-8]}}"),
            "pools[0].affinity.cores[1]: is '9-8'; write hardware threads",
        ),
        (
            BASE.replace("2}", "2, affinity: {cores: [1 2]}}"),
            "pools[0].affinity.cores[0]: is '1 2'; write hardware threads",
        ),
        (
            BASE.replace("2}", "2, affinity: {transfer_cores: [0-999999999999]}}"),
            "pools[0].affinity.transfer_cores[0]: is '0-999999999999'; write",
        ),
        (
            BASE.replace("2}", "2, affinity: {cores: ['0'], transfer_cores: ['1']}}"),
            "pools[0].affinity.transfer_cores[0]: is '1', but the same worker's cores[0] is '0'; choose",
        ),
        (
            BASE.replace("2}", "2, affinity: {cores: [0-3, 4-7], transfer_cores: ['3']}}"),
            "pools[0].affinity.transfer_cores[0]: is '3', but the same worker's cores[1] is '4-7'",
        ),
        (BASE + "router: {}\nrouter: {}\n", "spec:6: router: is there twice; keep one"),
        (BASE + "name: [\n", "spec:6: this isn't YAML"),
        ("\x00", "spec: this isn't YAML"),
        ("", "spec is empty; `splitserve spec show"),
        ("a: &a [*a]", "spec:1: the alias a contains itself"),
        ("a: &a [1]\nb: &a [*a]", "spec:2: the alias a contains itself"),
        ("a: " + "[" * 5000 + "]" * 5000, "spec:1: a cluster spec has at most 32 levels"),
        ("- 3", "spec:1: must be a mapping (key: value), but is a list"),
        ("name: 2024-13-01", "spec:1: model: is missing and has no default"),
        ("name: !!timestamp 2024-13-01", "spec: "),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "affinity",
    [
        "cores: ['0-7', '8-15'], transfer_cores: ['7', '15']",
        "cores: ['0-7, 16'], transfer_cores: ['6 - 7,16']",
        "transfer_cores: ['3']",
        "cores: ['0-7', ''], transfer_cores: ['1']",
    ],
)
def test_lists_of_cores_are_taken(affinity: str) -> None:
    assert parse_spec(BASE.replace("2}", f"2, affinity: {{{affinity}}}}}")).num_workers


def test_a_pool_may_say_what_holds_for_all() -> None:
    spec = parse_spec(BASE.replace("2}", "2, engine: {block_size: 8}}") + "engine: {block_size: 8}\n")
    assert [spec.engine_config(pool).block_size for pool in spec.pools] == [8, 8]


def test_all_contradictions_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(BASE.replace("slow", "fast") + "network: {host: a, interface: b}\nconnector: {transports: [x]}\n")
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "pools[1].name",
        "network",
        "connector.transports",
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda parts: (
            st.lists(parts)
            | st.dictionaries(st.sampled_from(["name", "model", "pools", "path", "role", "count", "x"]), parts)
        ),
        max_leaves=20,
    )
)
def test_any_document_is_a_spec_or_refused_in_words(document: object) -> None:
    text = yaml.safe_dump(document)
    try:
        assert isinstance(parse_spec(text), ClusterSpec)
    except ConfigError as error:
        assert str(error).startswith("spec")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*nowhere\.yaml: No such file"):
        read_spec(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "large.yaml").write_text("#" * (256 << 10) + "\n")
    with pytest.raises(ConfigError, match=r"large\.yaml has more than the 262144 bytes allowed"):
        read_spec(str(tmp_path / "large.yaml"))


# ---- the schema ----


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")
def test_the_shipped_schema_is_that_of_the_structs() -> None:
    """Write it anew with: python scripts/reference_pages.py"""
    assert (ROOT / "docs" / "reference" / "cluster-spec.schema.json").read_text() == schema_text()


def test_schema_and_reader_agree() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for text in (BASE, FULL):
        validator.validate(yaml.safe_load(text))
    for text in (BASE + "rooter: {}", BASE.replace("2}", "two}"), BASE.replace("role: decode", "role: d"), "{}"):
        assert not validator.is_valid(yaml.safe_load(text))


# ---- the commands ----


def test_spec_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.yaml").write_text(FULL)
    assert cli.main(["spec", "check", "--document-only", str(tmp_path / "good.yaml")]) == 0
    assert "qwen on 2 prefill-h200 + 1 decode: nothing is wrong" in capsys.readouterr().out
    (tmp_path / "bad.yaml").write_text(BASE + "rooter: 1")
    assert cli.main(["spec", "check", str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml:5: rooter: there is no such setting" in capsys.readouterr().err
    assert cli.main(["spec", "show", "/some/model", "--prefill", "1", "--decode", "2", "--kv-memory", "1GiB"]) == 0
    shown = parse_spec(capsys.readouterr().out)
    assert [(pool.name, pool.count, pool.memory.kv) for pool in shown.pools] == [
        ("prefill", 1, 1 << 30),
        ("decode", 2, 1 << 30),
    ]
    assert cli.main(["spec", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize("option", [["other/model"], ["--prefill", "3"], ["--port", "1"], ["--kv-memory", "1G"]])
def test_options_beside_a_spec_are_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.yaml").write_text(BASE)
    assert cli.main(["serve", "--spec", str(tmp_path / "spec.yaml"), *option]) == 2
    assert "doesn't go with --spec" in capsys.readouterr().err
    assert cli.main(["serve"]) == 2
    assert "Give the path of a checkpoint, or --spec FILE" in capsys.readouterr().err


# ---- secrets and addresses ----


def test_secrets_are_read_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("the key\n")
    spec = parse_spec(FULL.replace("/run/key", str(tmp_path / "key")))
    with pytest.raises(ConfigError, match=r"secrets\.shared\.env: the variable MY_SECRET isn't set here"):
        resolve_secrets(spec)
    monkeypatch.setenv("MY_SECRET", "correct horse battery")
    assert resolve_secrets(spec) == Secrets(secret="correct horse battery", api_key="the key")
    monkeypatch.setenv("SPLITSERVE_SECRET", "from the usual variable")
    assert resolve_secrets(parse_spec(BASE)) == Secrets(secret="from the usual variable")
    assert "correct horse" not in to_yaml(spec)
