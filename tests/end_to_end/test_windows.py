"""Clusters that serve models with sliding windows: a hand-over has blocks of two groups, and none is missing."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from mxfp4_checkpoints import pack_experts
from serving import Reference, complete_all, transformers_greedy, wait_until_quiet, worker_metrics
from small_clusters import BLOCK_SIZE, MAX_TOKENS, body, cluster
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.doctor.cluster import read_report
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.probe import look_by_probe
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from waiting import wait_until
from window_checkpoints import WINDOW, write_window_model

LONG_OUTPUT = 120


def make_prompts() -> list[list[int]]:
    """Prompts around the sizes of a block and the window, of several chunks, and two with a common prefix."""
    chosen = random.Random(7)

    def draw(count: int) -> list[int]:
        return [chosen.randrange(300, 1500) for _ in range(count)]

    shared = draw(5 * BLOCK_SIZE)
    lengths = (1, BLOCK_SIZE, WINDOW - 1, WINDOW, WINDOW + 1, 65, 150, 401)
    return [*(draw(length) for length in lengths), shared, shared + draw(16)]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def window_model(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_window_model(tmp_path_factory.mktemp("windows") / "gemma3", "Gemma3ForCausalLM", tiny_qwen3)


@pytest.fixture(scope="module")
def references(window_model: Path) -> list[Reference]:
    return transformers_greedy(window_model, PROMPTS, MAX_TOKENS)


def check_twice(running: LocalCluster, model: Path, references: list[Reference], mode: str) -> None:
    """Each prompt gives the right tokens, alone and beside the others; the second time its prefix is found."""
    bodies = [body(model, prompt) for prompt in PROMPTS]
    for at_once in (False, True):
        answers = complete_all(running.url, bodies, at_once=at_once)
        for prompt, reference, answer in zip(PROMPTS, references, answers, strict=True):
            assert answer["status"] == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            assert reference.agrees(tokens), f"at once {at_once}, prompt of {len(prompt)}: {tokens}"
            assert answer["splitserve"]["mode"] == mode
            num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert not at_once or num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    metrics = wait_until_quiet(running.url)
    if mode == "disaggregated":
        assert sum(worker["handovers_total"] for worker in metrics.values()) == 2 * len(PROMPTS)
    assert all(worker["handover_failures_total"] == 0 for worker in metrics.values())


@pytest.mark.parametrize(
    ("shape", "mode"), [("1P1D", "disaggregated"), pytest.param("mixed", "local", marks=pytest.mark.slow)]
)
def test_greedy_tokens_are_those_of_transformers(
    window_model: Path, references: list[Reference], shape: str, mode: str
) -> None:
    with cluster(window_model, shape, verify_kv=True) as running:
        check_twice(running, window_model, references, mode)
        endpoint = Endpoint(running.url)
        checks, _ = look_by_probe(endpoint, read_report(endpoint), "")
    assert not [problem for check in checks for problem in check.problems], "the doctor counts both groups' blocks"


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_workers_of_different_sizes_hand_over_both_groups(
    window_model: Path, references: list[Reference], prefill_tp: int, decode_tp: int
) -> None:
    engine = EngineConfig(
        model=str(window_model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=16 << 20, threads=1,
        max_num_batched_tokens=64, max_num_seqs=16,
    )  # fmt: skip
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    with LocalCluster(spec, log_level="warning") as running:
        check_twice(running, window_model, references, "disaggregated")


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "expert_parallel"),
    [(1, 1, "auto"), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((2, 1, "on"), (1, 2, "off")))],
)
def test_sinks_and_experts_in_mxfp4(
    tiny_qwen3: Path, tmp_path: Path, prefill_tp: int, decode_tp: int, expert_parallel: str
) -> None:
    model = write_window_model(tmp_path / "gpt-oss", "GptOssForCausalLM", tiny_qwen3)
    pack_experts(model)
    engine = EngineConfig(
        model=str(model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=16 << 20, threads=1,
        max_num_batched_tokens=64, max_num_seqs=16,
    )  # fmt: skip
    sizes = {"prefill_tp": prefill_tp, "decode_tp": decode_tp}
    if (prefill_tp, decode_tp) != (1, 1):
        engine = msgspec.structs.replace(engine, expert_parallel=expert_parallel)
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=1, **sizes)
    with LocalCluster(spec, log_level="warning") as running:
        check_twice(running, model, transformers_greedy(model, PROMPTS, MAX_TOKENS), "disaggregated")


def test_tokens_stay_right_when_a_decode_worker_dies(window_model: Path) -> None:
    prompts = PROMPTS[2:7]
    references = transformers_greedy(window_model, prompts, LONG_OUTPUT)
    engine = EngineConfig(
        model=str(window_model), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=16 << 20, threads=1,
        max_num_batched_tokens=64,
    )  # fmt: skip
    protocol = ProtocolConfig(heartbeat_seconds=0.25)
    spec = simple_spec(engine, port=0, num_prefill=1, num_decode=2, protocol=protocol)
    bodies = [body(window_model, prompt, max_tokens=LONG_OUTPUT) for prompt in prompts]
    with LocalCluster(spec, log_level="error") as running, ThreadPoolExecutor(1) as executor:
        answers = executor.submit(complete_all, running.url, bodies, at_once=True)
        wait_until(lambda: worker_metrics(running.url).get("decode-0", {}).get("num_running", 0) > 0, "decode runs")
        os.kill(running.pids["decode-0"], signal.SIGKILL)
        for prompt, reference, answer in zip(prompts, references, answers.result(), strict=True):
            assert answer["status"] == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            assert reference.agrees(tokens), f"prompt of {len(prompt)}: {tokens}"
