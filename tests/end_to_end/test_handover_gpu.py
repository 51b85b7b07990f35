"""Hand-overs between GPUs: the right bytes by CUDA IPC, the tokens of a mixed worker, and peers that die meanwhile."""

import json
import multiprocessing
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.benchmarks.kv.handover import devices, layout_of
from splitserve.benchmarks.kv.handover_ranks import FIRST_GENERATION, SOURCE, RankSetup, serve_source, two_workers
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.transfer.connector import Link, PeerConnected, ServedMemory
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.memory_records import MemoryKind
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

pytestmark = pytest.mark.gpu2

WAIT_SECONDS = 30.0
HEARTBEATS_SECONDS = 3.0
MIB = 1 << 20


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_blocks_travel_between_gpus_by_cuda_ipc(prefill: int, decode: int) -> None:
    """Ranks share GPUs if there are too few; every head of every block is checked."""
    num_blocks = 96
    layouts = [layout_of("llama-3.2-1b", "bfloat16", 64, ranks) for ranks in (prefill, decode)]
    places = [
        [RankSetup(layout, rank, num_blocks, name) for rank, name in enumerate(names)]
        for layout, names in zip(layouts, devices("cuda", *layouts), strict=True)
    ]
    with two_workers(places[0], places[1], 0.0) as sinks:
        chosen, paths = random.Random(1), set()
        for path in (None, *ReadPath):  # one that can't be taken is chosen by cost
            links: list[Link] = sinks.call("connect", sinks.welcome, ReadSettings.of(MemoryKind.VRAM, path=path))
            assert all("cuda_ipc" in link.transport and not link.problem for link in links), links
            for count in (1, 17, 64):
                local, remote = (chosen.sample(range(num_blocks), count) for _ in range(2))
                paths |= {timing.path for timing in sinks.call("read", local, remote)}
                sinks.call("check", local, remote)
        own = {"direct"} if prefill == decode else {"layers", "staged", "kernel"}
        assert paths == own | {"gathered", "mapped"}


PROMPTS = [
    [300 + (7 * index + 3 * i) % 900 for i in range(length)] for index, length in enumerate((1, 64, 65, 300, 700))
]


@contextmanager
def cluster(model: Path, engine: dict[str, Any] | None = None, **shape: Any) -> Iterator[LocalCluster]:
    settings: dict[str, Any] = {"max_num_batched_tokens": 256, "tail_chunk_tokens": 32, "enable_prefix_caching": False}
    config = EngineConfig(
        model=str(model), device="cuda", dtype="float32", kv_memory_bytes=256 * MIB, max_num_seqs=8,
        **{**settings, **(engine or {})},
    )  # fmt: skip
    with LocalCluster(simple_spec(config, port=0, **shape), log_level="info") as running:
        yield running


def complete(url: str, model: Path, prompt: list[int], max_tokens: int = 24) -> dict[str, Any]:
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "return_route": True}  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        decoded: dict[str, Any] = json.loads(answer.read())
    return decoded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from splitserve.models.demo.checkpoint import write_demo_model

    return write_demo_model(tmp_path_factory.mktemp("checkpoints") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def tokens_of_mixed(tiny: Path) -> list[list[int]]:
    with cluster(tiny, num_mixed=1) as running:
        return [complete(running.url, tiny, prompt)["choices"][0]["token_ids"] for prompt in PROMPTS]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_tokens_are_those_of_a_mixed_worker(
    tiny: Path, tokens_of_mixed: list[list[int]], prefill_tp: int, decode_tp: int
) -> None:
    if prefill_tp + decode_tp > torch.cuda.device_count():
        pytest.skip(f"needs {prefill_tp + decode_tp} GPUs")
    shape = {"num_prefill": 1, "num_decode": 1, "prefill_tp": prefill_tp, "decode_tp": decode_tp}
    with cluster(tiny, **shape) as running:
        for prompt, expected in zip(PROMPTS, tokens_of_mixed, strict=True):
            answer = complete(running.url, tiny, prompt)
            assert answer["splitserve"]["mode"] == "disaggregated"
            assert "cuda_ipc" in answer["splitserve"]["handover"]["transport"]
            assert answer["choices"][0]["token_ids"] == expected


BLOCK_SIZE, TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS = 16, 40, 160, 4
WARM_PROMPTS, WARM_TOKENS = 9, 31 * BLOCK_SIZE  # for a model of prefill's own steps


def prefix_blocks_read(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^splitserve_link_prefix_blocks_total\{.*\} (\S+)$", text, re.MULTILINE)))


def test_later_turns_are_read_from_decode_with_the_tokens_of_a_mixed_worker(tiny: Path) -> None:
    """Steps of 16 tokens, so that computing takes much longer than reading."""
    chosen = random.Random(1)
    steps = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": BLOCK_SIZE, "tail_chunk_tokens": 0}
    caching = {"enable_prefix_caching": True}
    asked: list[tuple[list[int], list[int]]] = []
    with cluster(tiny, steps | caching, num_prefill=1, num_decode=1, policy="least-loaded") as running:
        for _ in range(WARM_PROMPTS):
            complete(running.url, tiny, chosen.choices(range(300, 1500), k=WARM_TOKENS))
        time.sleep(HEARTBEATS_SECONDS)  # the router hears of the model
        for _ in range(2):
            conversation: list[int] = []
            for _ in range(NUM_TURNS):
                conversation += chosen.choices(range(300, 1500), k=TURN_TOKENS)
                answer = complete(running.url, tiny, conversation, ANSWER_TOKENS)["choices"][0]["token_ids"]
                asked.append((list(conversation), answer))
                conversation += answer
        time.sleep(HEARTBEATS_SECONDS)
        assert prefix_blocks_read(running.url) >= NUM_TURNS * (ANSWER_TOKENS // BLOCK_SIZE - 1)
    with cluster(tiny, steps, num_mixed=1) as running:
        for prompt, answer in asked:
            assert complete(running.url, tiny, prompt, ANSWER_TOKENS)["choices"][0]["token_ids"] == answer


class Source:
    """A process on the first GPU with ``num_blocks`` blocks of a Llama-3.1-8B."""

    def __init__(self, num_blocks: int) -> None:
        self.layout = layout_of("llama-3.1-8b", "bfloat16", 64)
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        place = RankSetup(self.layout, 0, num_blocks, "cuda:0")
        self.process = context.Process(target=serve_source, args=(place, 0.0, theirs), daemon=True)
        self.process.start()
        assert pipe.poll(120.0), "the source doesn't start"
        served: ServedMemory = pipe.recv()
        self.welcome = PeerWelcome(
            self.layout, served.connector, list(served.generations_addresses), list(served.ranks)
        )
        self._pipe = pipe

    def kill(self) -> None:
        assert self.process.pid is not None
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def assert_holds(memory: KVMemory, local: list[int], remote: list[int]) -> None:
    """The source's content of ``remote``, as :func:`serve_source` writes it, of the heads of rank 0."""
    heads = torch.arange(memory.blocks.shape[2], device=memory.device)
    for low in range(0, len(local), 64):
        content = (torch.tensor(remote[low : low + 64], device=memory.device)[:, None] * 7 + heads) % 251
        landed = memory.blocks[torch.tensor(local[low : low + 64], device=memory.device)]
        assert bool((landed == content.to(landed.dtype)[:, None, :, None, None, None]).all())


@pytest.mark.parametrize("path", [ReadPath.MAPPED, ReadPath.KERNEL])
def test_a_read_that_is_awaited_needs_no_thread(path: ReadPath) -> None:
    """Twice, of runs and of single blocks; then the source is killed, and the reading thread says so."""
    num_blocks, source = 64, Source(64)
    layout = layout_of("llama-3.1-8b", "bfloat16", 64, 2 if path is ReadPath.KERNEL else 1)
    memory = KVMemory(layout, num_blocks, torch.device("cuda", 1))
    woken = threading.Event()
    connector = NixlConnector(Party("decode-0", 5), memory, woken.set, settings=ReadSettings.of(memory.kind, path=path))

    def event() -> ReadResult | PeerConnected:
        assert woken.wait(WAIT_SECONDS)
        woken.clear()
        (found,) = connector.events()
        return found

    connector.connect(SOURCE, source.welcome)
    connected = event()
    assert isinstance(connected, PeerConnected) and connected.error is None, connected
    blocks = [*range(16), *random.Random(3).sample(range(16, num_blocks), 16)]
    for read_id in range(4):
        memory.blocks.zero_()
        torch.cuda.synchronize(1)
        connector.read(ReadCommand(read_id, SOURCE, blocks[::-1], blocks), awaited=True)
        while connector.is_landing():
            pass
        result = event()
        assert isinstance(result, ReadResult) and result.error is None and result.path is path
        assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in blocks]
        if read_id:  # the first one may have to wait for the kernel's compiler
            assert result.stages.woken == 0.0, "a thread was woken"
        assert_holds(memory, blocks[::-1], blocks)
    source.kill()
    connector.read(ReadCommand(9, SOURCE, blocks[::-1], blocks), awaited=True)
    while connector.is_landing():
        pass
    result = event()
    assert isinstance(result, ReadResult) and result.error is not None
    connector.disconnect(SOURCE)
    connector.close()


@pytest.mark.parametrize("path", [ReadPath.DIRECT, ReadPath.MAPPED, ReadPath.KERNEL])
def test_a_source_killed_in_the_middle_of_a_read_leaves_the_reader_alive(path: ReadPath) -> None:
    """Six times; its memory is given back, and the next source is read from as if nothing had happened. A read that
    succeeds has the right bytes. By the kernel, half of the source's heads are read."""
    num_blocks, num_mib = 512, 4096  # some 13 ms
    woken = threading.Event()
    layout = layout_of("llama-3.1-8b", "bfloat16", 64, 2 if path is ReadPath.KERNEL else 1)
    memory = KVMemory(layout, num_blocks, torch.device("cuda", 1))
    settings = ReadSettings.of(memory.kind, path=path)
    connector = NixlConnector(Party("decode-0", 5), memory, woken.set, settings=settings)
    events: list[ReadResult | PeerConnected] = []

    def event(seconds: float) -> ReadResult | PeerConnected | None:
        deadline = time.monotonic() + seconds
        while not events and time.monotonic() < deadline:
            woken.wait(0.05)
            woken.clear()
            events.extend(connector.events())
        return events.pop(0) if events else None

    everything = list(range(num_blocks))
    shuffled = random.Random(3).sample(everything, num_blocks)
    outcomes: list[str] = []
    for attempt in range(6):
        source = Source(num_blocks)
        connector.connect(SOURCE, source.welcome)
        connected = event(WAIT_SECONDS)
        assert isinstance(connected, PeerConnected) and connected.error is None, connected
        connector.read(ReadCommand(2 * attempt, SOURCE, everything, shuffled))
        whole = event(WAIT_SECONDS)
        assert isinstance(whole, ReadResult) and whole.error is None, whole
        assert whole.path is path
        assert list(whole.generations) == [FIRST_GENERATION + block_id for block_id in shuffled]
        connector.read(ReadCommand(2 * attempt + 1, SOURCE, everything, shuffled))
        time.sleep(attempt * 0.0022)
        free_before = torch.cuda.mem_get_info(0)[0]
        source.kill()
        cut = event(2.0)
        outcome = "no result" if cut is None else str(getattr(cut, "error", cut))
        connector.disconnect(SOURCE)
        if cut is None:
            cut = event(WAIT_SECONDS)
        assert isinstance(cut, ReadResult), "a read isn't terminal after the disconnect"
        outcomes.append(outcome)
        deadline = time.monotonic() + WAIT_SECONDS
        # Half of it will do: processes of other tests take memory of this GPU meanwhile
        while (freed := (torch.cuda.mem_get_info(0)[0] - free_before) / MIB) < num_mib / 2:
            assert time.monotonic() < deadline, (
                f"{freed:.0f} of {num_mib} MiB came back: the reader has them {outcomes}"
            )
            time.sleep(0.1)
        memory.blocks[0].fill_(1.0)
        torch.cuda.synchronize(1)  # no sticky error
    print(*outcomes, sep="\n")
    if path is ReadPath.DIRECT:  # a mapping outlives its owner, who takes longer to end than these copies
        assert not outcomes[0].startswith("None"), "no read was cut"
    connector.close()
