"""Mistakes of users: errors first, suggestions, every fault of a spec at once, nothing left behind."""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from command_line import splitserve
from splitserve.common.errors import ConfigError
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.orchestration.cli import main as cli
from splitserve.orchestration.hosts.gpus import Gpu
from splitserve.orchestration.spec import small_files
from splitserve.orchestration.spec.document import parse_spec, read_spec
from splitserve.orchestration.spec.expansion import read_secret, resolve_secrets
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.orchestration.spec.small_files import read_small_file
from splitserve.orchestration.spec.start_checks import Machine, address_problems, capacity_problems, file_problems
from splitserve.protocol.engine_config import machine_problems

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Machine(num_cpus=2, memory_bytes=24 << 30, gpus=())


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on standard error of a command that is refused."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    return capsys.readouterr().err.splitlines()


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "splitserve: error: the following arguments are required: COMMAND"),
        (["srve", "m"], "splitserve: error: argument COMMAND: there is no 'srve'; did you mean serve?"),
        (["serve", "m", "--mixd", "1"], "splitserve serve: error: there is no option --mixd; did you mean --mixed?"),
        (
            ["serve", "m", "--max_num_sequences=3"],
            "splitserve serve: error: there is no option --max_num_sequences; did you mean --max-num-seqs?",
        ),
        (["serve", "m", "--dtype", "bf16"], "argument --dtype: there is no 'bf16'; did you mean bfloat16?"),
        (["serve", "m", "--dtype", "int3"], "there is no 'int3'; choose one of auto, float32, bfloat16, float16"),
        (["serve", "m", "more"], "splitserve serve: error: unexpected argument: more"),
        (["serve", "m", "--port", "70000"], "--port: must be a whole number between 0 and 65535, got '70000'"),
        (["serve", "m", "--mixed", "-1"], "--mixed: must be a whole number between 0 and 4096, got '-1'"),
        (["serve", "m", "--mixed", "5000"], "--mixed: must be a whole number between 0 and 4096, got '5000'"),
        (["serve", "m", "--host", ""], "--host: must be an address like 127.0.0.1, ::1 or 0.0.0.0 (all), got ''"),
        (["serve", "m", "--kv-load-seconds", "inf"], "--kv-load-seconds: must be a finite number, got 'inf'"),
        (["serve", "m", "--gpu-memory-utilization", "nan"], "must be a finite number, got 'nan'"),
        (["serve", "m", "--kv-memory", "9" * 400], "is more than the 1152921504606846976 bytes allowed"),
        (["demo-model", ""], "argument DIR: must be a path, got ''"),
        (["demo-model", "d", "--max-shard-size", "0"], "--max-shard-size: must be more than 0 bytes, got '0'"),
        (["lmcache", "--memory", "0"], "--memory: must be between 1048576 and 1152921504606846976 bytes, got '0'"),
        (["scale", "decode", "x"], "argument N: must be a whole number between 0 and 4096, got 'x'"),
        (["bench", "kernel"], "argument BENCH: there is no 'kernel'; did you mean kernels?"),
        (["bench", "serve", "--modle", "m"], "there is no option --modle; did you mean --model?"),
        (["spec", "chek", "f"], "argument COMMAND: there is no 'chek'; did you mean check?"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_errors_come_first_and_usage_is_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(*arguments, capsys=capsys)
    assert error in lines[0]
    assert len(lines) == 2 and lines[1].startswith("usage: splitserve")


def test_numbers_are_bounded_by_the_machine() -> None:
    engine = parse_spec("model: {path: m}\npools: [{name: a, role: mixed, threads: 5}]\nengine: {read_threads: 5}")
    problems = dict(machine_problems(engine.engine_config(engine.pools[0]), num_cpus=2))
    assert problems["threads"] == (
        "must be between 0 and 4 on this machine (2 hardware threads), got 5; 0 lets it decide"
    )
    assert problems["read_threads"].startswith("must be between 0 and 4 on this machine")
    assert not list(machine_problems(engine.engine_config(engine.pools[0]), num_cpus=8))


def problems_of(model: Path, machine: Machine, *options: str) -> dict[str, str]:
    """Places and what is wrong there with options of ``serve``."""
    from splitserve.orchestration.cli.options import cluster_spec

    spec = cluster_spec(cli.build_parser().parse_args(["serve", str(model), *options]))
    return dict([*file_problems(spec), *capacity_problems(spec, machine)])


GPU = Gpu(0, "GPU-1", "0000:01:00.0", "H200", 139 << 30)


@pytest.mark.parametrize(
    ("options", "place", "text"),
    [
        (["--mixed", "1", "--max-model-len", "5000"], "model.max_model_len", "must be at most 4096"),
        (["--mixed", "1", "-tp", "3"], "pools[0].tensor_parallel_size", "can't be shared by 3 tensor-parallel ranks"),
        (["--mixed", "1", "--kv-memory", "1"], "pools[0].memory.kv", "must be at least 64.0 KiB for 32 tokens"),
        (["--mixed", "97"], "pools", "hold at most 96 worker processes, got 97"),
        (["--mixed", "2", "--kv-memory", "13GiB"], "pools[0].memory.kv", "takes most of the 26.00 GiB"),
        (["--mixed", "1", "--host-kv-memory", "100TiB"], "pools[0].memory.host", "this machine has 24.00 GiB"),
        (["--mixed", "1", "--max-batched-tokens", "16000000"], "engine.max_num_batched_tokens", "must be at most "),
        (["--mixed", "1", "--threads", "5"], "pools[0].threads", "must be between 0 and 4 on this machine"),
        (["--mixed", "1", "--device", "cuda"], "pools", "1 GPUs are needed"),
        (["--mixed", "1", "--disk-kv-dir", "/proc/kv"], "engine.disk_kv_dir", "can't write to /proc/kv"),
        (["--mixed", "1", "--profile-dir", "/dev/null/x"], "engine.profile_dir", "can't write to /dev/null/x"),
        (["--mixed", "1", "--secret-file", "/no/file"], "secrets.shared.file", "No such file or directory"),
        (["--mixed", "1", "--api-key-file", "/dev/zero"], "secrets.api_key.file", "is a device"),
    ],
)
def test_what_cannot_start_here_is_known_before_it_starts(
    tiny_qwen3: Path, options: list[str], place: str, text: str
) -> None:
    problems = problems_of(tiny_qwen3, SMALL, *options)
    assert text in problems.get(place, ""), problems
    assert not problems_of(tiny_qwen3, SMALL, "--mixed", "1")


def test_sequences_are_bounded_by_memory(tiny_qwen3: Path) -> None:
    little = Machine(num_cpus=2, memory_bytes=256 << 20, gpus=())
    problems = problems_of(tiny_qwen3, little, "--mixed", "1", "--max-num-seqs", "65536")
    assert problems["engine.max_num_seqs"].startswith("must be at most 32768 here")


def test_memory_of_gpus_bounds_what_is_on_gpus(tiny_qwen3: Path) -> None:
    machine = Machine(num_cpus=2, memory_bytes=24 << 30, gpus=(GPU,))
    problems = problems_of(tiny_qwen3, machine, "--mixed", "1", "--kv-memory", "200GiB")
    assert problems == {
        "pools[0].memory.kv": "takes 200.00 GiB of each GPU, and the largest one has 139.00 GiB; lower it"
    }
    assert not problems_of(tiny_qwen3, machine, "--mixed", "1", "--kv-memory", "100GiB")


def test_a_start_that_cannot_succeed_starts_nothing(tiny_qwen3: Path, state: Path) -> None:
    for name in ("serve", "up"):
        said = splitserve(
            name, str(tiny_qwen3), "--mixed", "1", "--max-model-len", "9999", "--host", "nosuch.invalid", status=2
        )
        assert said.splitlines() == [
            "splitserve: error: --max-model-len: must be at most 4096, where the model's positions end, got 9999",
            said.splitlines()[1],
        ]
        assert said.splitlines()[1].startswith("--host: can't listen on nosuch.invalid port 8000: ")
    assert not state.exists()


# ---- specs ----


def test_all_faults_of_a_spec_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: My Cluster\n"
        "model: {path: /nowhere, max_model_len: 1}\n"
        "pools:\n"
        "- {name: fast, role: prefil, cuont: 2, memory: {kv: lots}, environment: {A: 1, UCX_TLS: tcp}}\n"
        "- {name: fast, count: two, engine: {max_num_seqs: -1, atention_backend: triton}}\n"
        "router: {port: 99999, host: '', policy: best}\n"
        "objectives: {ttft_ms: .inf}\n"
        "secrets: {shared: {file: /no/file}, api_key: {env: NO_SUCH_VARIABLE}}\n"
        "protocol: {heartbeat_seconds: 0}\n"
    )
    lines = run("spec", "check", str(path), capsys=capsys)
    places = [line.removeprefix("splitserve: error: ").removeprefix(f"{path}:").split(": ")[:2] for line in lines]
    assert places == [
        ["1", "name"],
        ["2", "model.max_model_len"],
        ["2", "model.path"],
        ["4", "pools[0].cuont"],
        ["4", "pools[0].environment.A"],
        ["4", "pools[0].environment.UCX_TLS"],
        ["4", "pools[0].memory.kv"],
        ["4", "pools[0].role"],
        ["5", "pools[1].count"],
        ["5", "pools[1].engine.atention_backend"],
        ["5", "pools[1].engine.max_num_seqs"],
        ["5", "pools[1].name"],
        ["5", "pools[1].role"],
        ["6", "router.host"],
        ["6", "router.policy"],
        ["6", "router.port"],
        ["7", "objectives.ttft_ms"],
        ["8", "secrets.api_key.env"],
        ["8", "secrets.shared.file"],
        ["9", "protocol.heartbeat_seconds"],
    ]
    assert not any("no worker" in line for line in lines), "what a repair made isn't said"


def test_files_can_be_left_out_of_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {path: /elsewhere}\npools: [{name: a, role: mixed}]\nsecrets: {shared: {env: NOT_HERE}}\n")
    assert cli.main(["spec", "check", "--document-only", str(path)]) == 0
    assert len(run("spec", "check", str(path), capsys=capsys)) == 2


def test_keys_that_are_no_text_and_names_with_dots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(
            "model: {path: m}\n1: 2\npools:\n"
            "- {name: a, role: mixed, environment: {1: x, a.b: 3}, nodes: {resources: {x/y.z: many}}}\n"
        )
    assert str(caught.value).splitlines() == [
        "spec:1: has the key 1, which is no text; quote it",
        "spec:4: pools[0].environment: has the key 1, which is no text; quote it",
        "spec:4: pools[0].environment.a.b: must be text, but is a whole number; quote it",
        "spec:4: pools[0].nodes.resources.x/y.z: must be a number, but is text",
    ]


def levels(first: str, each: str) -> str:
    """Ten times as much in each level."""
    many = {number: ",".join([f"*a{number}"] * 10) for number in range(10)}
    return "\n".join([f"a0: &a0 {first}", *(f"a{n}: &a{n} {each.format(many[n - 1])}" for n in range(1, 10))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (levels("[x]", "[{}]"), "at most 5000 values, aliases written out"),
        (levels("{k: 1}", "{{<<: [{}]}}"), "at most 5000 values, aliases written out"),
        ("".join(f"k{number}: 1\n" for number in range(3000)), "spec:2500: a cluster spec has at most 5000 values"),
        ("[" * 50_000, "at most 32 levels"),
        ("- " * 50_000, "at most 32 levels"),
        ("a: &a {b: &b {c: *a}}", "the alias a contains itself"),
        ("a: *b", "found undefined alias"),
        ("name: '" + "x" * 5000 + "'", "a value has at most 4096 characters"),
        ("name: " + "1:" * 5000 + "1", "a value has at most 4096 characters"),
        ("name: !!int " + "9" * 4090, "spec:1: "),
    ],
    ids=lambda value: value[:20],
)
def test_documents_that_would_take_forever_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_aliases_are_for_what_pools_share() -> None:
    spec = parse_spec(
        "model: {path: m}\nengine: &all {block_size: 8}\n"
        "pools: [{name: a, role: mixed, engine: *all}, {name: b, role: mixed, engine: {<<: *all, max_num_seqs: 3}}]"
    )
    assert [spec.engine_config(pool).block_size for pool in spec.pools] == [8, 8]


# ---- files ----


def test_only_files_and_pipes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "PIPE_SECONDS", 0.3)
    (tmp_path / "large").write_bytes(b"x" * 5000)
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        "/dev/zero": "is a device",
        str(tmp_path): "is a directory",
        str(tmp_path / "large"): "has more than the 4096 bytes allowed",
        str(tmp_path / "none"): "No such file",
        str(tmp_path / "pipe"): "its writer sent no end within 0.3 s",
        "a\0b": "null byte",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read_secret(path, "")
        with pytest.raises(ConfigError, match=words):
            read_small_file(path, 4096)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("wb") as file:
            file.write(b"model: {path: m}\n")
            file.flush()
            time.sleep(0.1)
            file.write(b"pools: [{name: a, role: mixed}]\n")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_spec(str(pipe)).num_workers == 1
    writer.join()


def test_missing_files_of_the_router_are_problems_of_the_spec(tmp_path: Path) -> None:
    document = f"model: {{path: {tmp_path}}}\npools: [{{name: a, role: mixed}}]\n"
    spec = parse_spec(document + "router: {port: 0, tenants: /no/tenants.yaml, chat_template: /no/chat.jinja}\n")
    problems = dict(file_problems(spec))
    assert problems["router.tenants"] == "there is no file /no/tenants.yaml"
    assert problems["router.chat_template"] == "there is no file /no/chat.jinja"


@pytest.mark.parametrize("option", ["api_key", "shared"])
def test_looking_at_a_spec_leaves_secrets_in_their_pipes(tmp_path: Path, option: str) -> None:
    """As of ``--api-key-file <(command)``: what the checks read, the start couldn't read again."""
    reading, writing = os.pipe()
    try:
        os.write(writing, b"a secret")
        os.close(writing)
        document = f"model: {{path: {tmp_path}}}\npools: [{{name: a, role: mixed}}]\nrouter: {{port: 0}}\n"
        spec = parse_spec(document + f"secrets: {{{option}: {{file: /dev/fd/{reading}}}}}\n")
        problems = [*file_problems(spec), *address_problems(spec)]
        assert not [problem for problem in problems if problem[0].startswith("secrets")]
        found = resolve_secrets(spec)
    finally:
        os.close(reading)
    assert (found.api_key if option == "api_key" else found.secret) == "a secret"


def test_a_demo_model_has_the_modes_that_the_umask_leaves(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o027, 0o640)):
        previous = os.umask(umask)
        try:
            written = write_demo_model(tmp_path / f"{umask:o}")
        finally:
            os.umask(previous)
        assert {stat.S_IMODE(file.stat().st_mode) for file in written.iterdir()} == {mode}


# ---- clusters that don't start ----


def test_up_on_ray_without_ray_says_how_to_install_it(tiny_qwen3: Path, state: Path) -> None:
    program = (
        "import sys\nsys.modules['ray'] = None\n"
        "from splitserve.orchestration.cli import main as cli\nsys.exit(cli.main())"
    )
    arguments = ["up", "--ray", "local", str(tiny_qwen3), "--mixed", "1"]
    whole = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("splitserve: error: Ray is not installed: pip install 'ray")
    assert "pip install '.[ray]' in a clone" in done.stderr and done.stderr.count("\n") == 1
    assert not state.exists()


def test_the_doctor_says_something_before_it_imports_anything() -> None:
    program = (
        "import sys\nsys.modules['splitserve.orchestration.doctor.command'] = None\n"
        "from splitserve.orchestration.cli import main as cli\ncli.main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.endswith(": looking at this machine\n") and "ModuleNotFoundError" in done.stderr


def test_the_shorthand_bounds_what_documents_bound() -> None:
    from splitserve.protocol.config import EngineConfig

    with pytest.raises(ConfigError, match="kv_load_seconds must be more than 0 and at most 86400, got inf"):
        simple_spec(EngineConfig(model="m", kv_load_seconds=float("inf")), num_mixed=1)
