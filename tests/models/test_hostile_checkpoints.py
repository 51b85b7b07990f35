"""Checkpoints that would take for ever, all memory, or a traceback: each gives an error that names file and field."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from guarded_router import TOKEN_SECONDS, guarded_router
from router_harness import CHAT_TEMPLATE, RouterProcess, write_model_dir
from splitserve.common.errors import CheckpointError
from splitserve.models.config import load_model_config
from splitserve.models.weights.checkpoint import read_records, weight_files
from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.processes import template_process
from splitserve.router.text.processes.child import framed
from splitserve.router.text.processes.renderer import NUM_PROCESSES, Renderer, TemplateSource
from splitserve.router.text.processes.template_process import Rendering, Setup
from splitserve.router.text.tokenizer import ModelTokenizer
from waiting import PATIENCE_SECONDS, wait_until

BRACKETS = "[" * 100_000
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 400,
    "eos_token_id": 1,
}


# ---- config.json and its neighbours ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; a positive integer of at most 1024 is needed"),
        ({"hidden_size": 10**30}, "hidden_size is a number of more than 18 digits; .* at most 131072"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is a number of more than 18 digits"),
        ({"eos_token_id": 400}, "config.json: eos_token_id is 400; it must be between 0 and 399, vocab_size being 400"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is -1"),
        ({"eos_token_id": [1] * 300}, "eos_token_id has 300 entries; at most 256"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"bos_token_id": 400}, "bos_token_id is 400"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM'; a list is needed"),
        ({"architectures": [{}] * 100}, "architectures is a list; neither Splitserve nor transformers"),
        ({"layer_types": [["x"]] * 10**5}, r"layer_types has \['x'\], \['x'\], \['x'\] and 99997 more"),
        ({"rope_parameters": 5}, "rope_parameters is 5; an object is needed"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; an object is needed"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; true or false is needed"),
        ({"hidden_act": "x" * 10**5}, "hidden_act is 'x{79}\\.\\.\\."),
    ],
)
def test_a_config_beyond_its_bounds_is_refused_at_once(tmp_path: Path, change: dict[str, object], message: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [BRACKETS, '{"a":' * 100_000, '{"a": ' + "1" * 5000 + "}", '{"a": "\\ud8', ""])
def test_nested_and_garbled_files_are_named(tmp_path: Path, name: str, content: str):
    write_model_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        ModelTokenizer(tmp_path)
        load_model_config(tmp_path)
    assert len(str(caught.value)) < 1000


def test_endless_and_huge_files_are_not_read(tmp_path: Path):
    write_model_dir(tmp_path)
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"config\.json is no regular file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is no regular file"):
        ModelTokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointError, match=r"config\.json is larger than 4 MiB"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(CheckpointError, match=rf"{name} is larger than"):
            ModelTokenizer(tmp_path)
        write_model_dir(tmp_path)


def test_the_router_too_refuses_an_end_token_beyond_the_vocabulary(tmp_path: Path):
    write_model_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 400]}')
    for load in (ModelTokenizer, load_model_config):
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 400"):
            load(tmp_path)


# ---- weights ----


def write_safetensors(path: Path, header: str, num_bytes: int = 0) -> None:
    raw = header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(num_bytes))


TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**9, 10**9]},
        {"shape": [2, -2]},
        {"shape": [4.0]},
        {"shape": [2, 2] + [1] * 100},
        {"shape": "22"},
        {"dtype": 5},
        {"dtype": "F16"},
        {"data_offsets": [0, 16, 16]},
        {"data_offsets": [True, 16]},
        {"data_offsets": None},
    ],
)
def test_a_tensor_that_contradicts_itself_is_named(tmp_path: Path, change: dict[str, object]):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, json.dumps({"weight": TENSOR}), 16)
    assert list(read_records(tmp_path)) == ["weight"]
    write_safetensors(file, json.dumps({"weight": TENSOR | change}), 16)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header's entry of 'weight' is malformed"):
        read_records(tmp_path)


def test_hostile_headers_and_indexes_are_refused(tmp_path: Path):
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    for header, message in ((BRACKETS, "nested too deeply"), ("[]", "its header is a list"), ("{", "as JSON")):
        write_safetensors(file, header)
        with pytest.raises(CheckpointError, match=message):
            read_records(tmp_path)
    write_safetensors(file, " " * (17 << 20))
    with pytest.raises(CheckpointError, match="the header has 17825792 bytes; at most 16777216"):
        read_records(tmp_path)
    for name in ("../other.safetensors", "/etc/passwd", "..", 5, ["a"], "", "a\0b"):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(CheckpointError, match="files beside it are needed"):
            weight_files(tmp_path)
    for content, message in (
        ("[1]", "must hold a JSON object"),
        ('{"weight_map": 1}', "weight_map is 1"),
        (BRACKETS, "deeply"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            weight_files(tmp_path)


# ---- chat templates ----

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE_TEMPLATES = {
    "endless": (ENDLESS, "took longer than 0.5 s|ended its process"),
    "a power": ("{{ (messages | length + 1) ** 99999 ** 99999 }}", "took longer|ended its process|OverflowError"),
    "long text": (
        "{{ 'x' * (messages | length * 99999999999) }}",
        "refuses these messages|characters|ended its process",
    ),
    "wide text": ("{{ '%99999999999d' % messages | length }}", "refuses these messages|characters|ended its process"),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "refuses these messages: MemoryError|took longer|ended its process",
    ),
    "endless output": (
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "makes more than 33554432 characters",
    ),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    "surrogates": ("{{ '\\ud800' }}", "aren't Unicode"),
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_no_template_outlives_its_bounds(name: str):
    source, message = HOSTILE_TEMPLATES[name]
    before = set(psutil.Process().children())  # of modules that ran earlier

    async def run() -> None:
        renderer = Renderer(TemplateSource(source, {}, "x"), render_seconds=0.5 if "took longer" in message else 20.0)
        await renderer.start()
        try:
            for _ in range(NUM_PROCESSES + 1):  # one more: a process takes the place of one that ended
                with pytest.raises(ChatTemplateError, match=message):
                    await renderer.render([{"role": "user", "content": "a"}])
        finally:
            renderer.close()

    asyncio.run(run())
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 100_000 + " }}", "{% if %}", "{% for a in b %}" * 30 + "{% endfor %}" * 30]
)
def test_a_template_that_cannot_be_compiled_is_an_error_at_the_start(tmp_path: Path, source: str):
    write_model_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(RuntimeError, match=r"CheckpointError: the chat template of .* can't be compiled") as caught:
        RouterProcess(tmp_path)
    assert "Traceback" not in str(caught.value)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_renderings_are_right_in_any_order_and_after_a_kill():
    async def run() -> None:
        others = set(psutil.Process().children())  # multiprocessing's helper, for one
        renderer = Renderer(TemplateSource(CHAT_TEMPLATE, {}, "x"), render_seconds=20.0)
        await renderer.start()
        try:
            for _ in range(3):
                contents = ["é" * count for count in (0, 1, 70_000, 5, 1_000_000)] * 5
                texts = await asyncio.gather(*(renderer.render([{"role": "user", "content": c}]) for c in contents))
                assert texts == [f"<|im_start|>user\n{c}<|im_end|>\n<|im_start|>assistant\n" for c in contents]
                given_up = asyncio.create_task(renderer.render([{"role": "user", "content": "x" * 10**6}]))
                await asyncio.sleep(0)
                given_up.cancel()
                killed = list(set(psutil.Process().children()) - others)
                for child in killed:
                    child.kill()
                while any(runs(child) for child in killed):  # for long, if the machine is busy
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
        finally:
            renderer.close()
            await asyncio.sleep(0.05)  # for the callbacks of closed connections

    asyncio.run(run())


def hang(router: RouterProcess, _index: int) -> tuple[int, str]:
    messages = [{"role": "user", "content": "hang"}]
    status, _, answer = router.post("/v1/chat/completions", messages=messages, max_tokens=1)
    return status, answer["error"]["message"]


def test_streams_go_on_beside_an_endless_template(tmp_path: Path):
    write_model_dir(tmp_path)
    template = "{% if messages[0].content == 'hang' %}" + ENDLESS + "{% else %}ok{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with guarded_router(tmp_path) as (router, canary), ThreadPoolExecutor() as pool:
        gaps = []
        for _ in range(5):  # on a busy machine one attempt may be disturbed
            canary.reset()
            answers = list(pool.map(partial(hang, router), range(NUM_PROCESSES)))
            assert all(status == 400 and "chat template" in message for status, message in answers)
            messages = [{"role": "user", "content": "a"}]
            assert router.post("/v1/chat/completions", messages=messages, max_tokens=1)[0] == 200
            gaps.append(canary.settle())
            if gaps[-1] < 0.1:
                break
        assert TOKEN_SECONDS / 2 < min(gaps) < 0.1, gaps
        pids = [child.pid for child in psutil.Process(router.process.pid).children()]
        assert len(pids) == NUM_PROCESSES + 1, "and one that tokenises"
        router.process.kill()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "processes outlive their router")


def test_a_process_in_an_endless_template_ends_itself():
    """The limit holds even if its router is gone."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen([sys.executable, "-m", template_process.__name__], stdin=theirs.fileno())
        ours.sendall(framed(msgspec.msgpack.encode(Setup(ENDLESS, {}, 100, 0.5))))
        ours.sendall(framed(msgspec.json.encode(Rendering([{"role": "user", "content": "a"}]))))
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGALRM
