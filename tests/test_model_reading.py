"""Reading weights: the readers agree, a rank reads its shard alone, and no second copy of the model is made."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitserve.errors import CheckpointError, ConfigError
from splitserve.models import demo, reading
from splitserve.models.checkpoint import read_records
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import check_tensor_parallel_size, declare, stored_weights
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.layer import Layer
from splitserve.models.layers.weight import Stack
from splitserve.models.reading import DummyReader, MappedReader, StagedReader
from splitserve.models.shard import Parts, Shard, head_rows, local_config

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several files."""
    target = tmp_path_factory.mktemp("reading") / request.param
    return demo.write_demo_model(target, architecture=request.param, max_shard_bytes=1_000_000)


def parts_of(stack: Stack, shard: Shard) -> Parts:
    return tuple(weight.part(shard) for weight in stack)


def layer_parts(config: ModelConfig, index: int, shard: Shard) -> dict[str, Parts]:
    """The four matrices of a layer."""
    layer = declare(config).layers[index]
    assert isinstance(layer, LlamaLayer)
    found: dict[str, Layer] = {
        "qkv": layer.attention.qkv,
        "output": layer.attention.output,
        "gate_up": layer.mlp.gate_up,
        "down": layer.mlp.down,
    }
    return {name: parts_of(next(projection.stacks()), shard) for name, projection in found.items()}


def all_parts(config: ModelConfig, shard: Shard) -> list[Parts]:
    decoder = declare(config)
    stacks = [stack for layer in decoder.layers for stack in layer.stacks()]
    final_norm = next(stack for part in decoder.parts() if part not in decoder.layers for stack in part.stacks())
    return [
        parts_of(stack, shard) for stack in (*stacks, (decoder.embedding_weight,), (decoder.head_weight,), final_norm)
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging_bytes", [1, 10_000, 1 << 20])
def test_staged_reads_are_mapped_reads(checkpoint: Path, size: int, dtype: torch.dtype, staging_bytes: int) -> None:
    config, records = load_model_config(checkpoint), read_records(checkpoint)
    for rank in {0, size - 1}:
        weights = all_parts(config, Shard(rank, size))
        mapped = MappedReader(records, dtype)
        staged = StagedReader(records, dtype, CPU, num_threads=3, staging_bytes=staging_bytes)
        with torch.inference_mode():  # as the loader does
            staged.announce(weights)
        for parts in reversed(weights):
            assert torch.equal(mapped.read(parts), staged.read(parts)), parts
        staged.close()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ranks_shards_make_up_the_model_and_are_all_they_read(checkpoint: Path, size: int) -> None:
    config, records = load_model_config(checkpoint), read_records(checkpoint)
    reader = MappedReader(records, torch.float32)
    for index in range(config.num_layers):
        whole = layer_parts(config, index, Shard())
        parts = [layer_parts(config, index, Shard(rank, size)) for rank in range(size)]
        for name in ("output", "down"):
            joined = torch.cat([reader.read(part[name]) for part in parts], dim=1)
            assert torch.equal(joined, reader.read(whole[name]))
        gates, ups = zip(*[reader.read(part["gate_up"]).chunk(2) for part in parts], strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), reader.read(whole["gate_up"]))
        assert_heads_belong_together(config, reader.read(whole["qkv"]), [p["qkv"] for p in parts], reader)
    heads = [declare(config).head_weight.part(Shard(rank, size)) for rank in range(size)]
    joined = torch.cat([reader.read((head,)) for head in heads])
    assert torch.equal(joined, reader.read((declare(config).head_weight.part(Shard()),)))

    staged = StagedReader(records, torch.float32, CPU)
    staged.announce(all_parts(config, Shard(size - 1, size)))
    staged.close()
    local = stored_weights(local_config(config, size))
    expected = sum(torch.Size(weight.shape).numel() for weight in local.values())
    expected += torch.Size((len(heads[-1].rows or ()), config.hidden_size)).numel()
    assert staged.num_bytes == 4 * expected


def test_columns_of_a_file_are_all_that_is_read_of_it(tmp_path: Path) -> None:
    """By what the kernel counts, on a file that isn't in its cache."""
    path, num_rows, row_bytes, width = tmp_path / "weights", 512, 1 << 16, 1 << 14
    path.write_bytes(random.Random(1).randbytes(num_rows * row_bytes))
    content = np.fromfile(path, np.uint8).reshape(num_rows, row_bytes)
    file = reading._File(path)

    def bytes_read(columns: range) -> int:
        os.fsync(file._fd)
        os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before, into = _io_bytes(), np.empty(num_rows * len(columns), np.uint8)
        file.read(reading._Piece(file, 0, num_rows, row_bytes, columns, torch.bfloat16, torch.empty(0)), into)
        read = _io_bytes() - before
        assert (into.reshape(num_rows, -1) == content[:, columns.start : columns.stop]).all()
        return read

    whole = bytes_read(range(row_bytes))
    quarter = bytes_read(range(width, 2 * width))
    file.close()
    if whole < path.stat().st_size:
        pytest.skip("this file system doesn't count, or keeps what it should forget")
    assert num_rows * width <= quarter <= 1.5 * num_rows * width


def _io_bytes() -> int:
    """That this process has had read from disks; 0 where the platform doesn't count."""
    try:
        counters = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(counters.split("\nread_bytes:")[1].split()[0])


def assert_heads_belong_together(
    config: ModelConfig, whole: torch.Tensor, ranks: list[Parts], reader: MappedReader
) -> None:
    """Each rank has the key and value heads that its query heads read, in order."""
    heads = whole.view(-1, config.head_dim, config.hidden_size)
    queries, keys, values = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
    group, seen = config.num_heads // config.num_kv_heads, 0
    for parts in ranks:
        local = local_config(config, len(ranks))
        own = reader.read(parts).view(-1, config.head_dim, config.hidden_size)
        own_queries, own_keys, own_values = own.split([local.num_heads, local.num_kv_heads, local.num_kv_heads])
        local_group = local.num_heads // local.num_kv_heads
        for head, query in enumerate(own_queries):
            assert torch.equal(query, queries[seen])
            assert torch.equal(own_keys[head // local_group], keys[seen // group])
            assert torch.equal(own_values[head // local_group], values[seen // group])
            seen += 1
    assert seen == config.num_heads


def test_dummy_weights_are_parts_of_one_model(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    reader = DummyReader(stored_weights(config), torch.float32, CPU)
    whole = reader.read(layer_parts(config, 1, Shard())["down"])
    halves = [reader.read(layer_parts(config, 1, Shard(rank, 2))["down"]) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    assert not torch.equal(whole, reader.read(layer_parts(config, 2, Shard())["down"]))


def test_the_head_is_padded_to_even_rows() -> None:
    assert head_rows(1003, 1) == 1003
    assert head_rows(1003, 2) == 512
    assert head_rows(128256, 4) == 32064


def test_sizes_that_cannot_split_a_model_are_refused_with_those_that_can(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)  # 8 heads, 4 key/value heads, 384
    for size in (1, 2, 4, 8):
        check_tensor_parallel_size(config, size)
    with pytest.raises(ConfigError, match=r"8 attention heads, 4 key/value heads.*by 3 .*ranks; 1, 2, 4, 8 work"):
        check_tensor_parallel_size(config, 3)
    with pytest.raises(ConfigError, match="1, 3 work"):
        check_tensor_parallel_size(replace(config, num_heads=6, num_kv_heads=3, intermediate_size=9), 2)


def test_a_file_that_shrinks_while_it_is_read_is_named(checkpoint: Path, tmp_path: Path) -> None:
    config = load_model_config(checkpoint)
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    records = read_records(tmp_path)
    victim = records["model.norm.weight"].file
    os.truncate(victim, 1000)
    reader = StagedReader(records, torch.float32, CPU)
    parts = (stored_weights(config)["model.norm.weight"].part(Shard()),)
    reader.announce([parts])
    with pytest.raises(CheckpointError, match=f"{victim.name} ends too early"):
        reader.read(parts)
    reader.close()


_MEASURE = """
import sys, threading, time, torch
from splitserve.models.config import load_model_config
from splitserve.models.loader import load_model

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

torch.set_num_threads(1)
config = load_model_config(sys.argv[1])
before, peak, stop = anonymous_bytes(), 0, threading.Event()

def watch():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], config, dtype=torch.float32, device=torch.device("cpu"))
stop.set()
watcher.join()
print(peak - before, anonymous_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounting of memory")
def test_loading_needs_no_second_copy_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = demo.DemoShape(512, 12, 8, 4, 64, 1536, 2048, 512, 1e4, tie_word_embeddings=True, dtype="float32")
    monkeypatch.setitem(demo.SHAPES, "wide", shape)
    path = demo.write_demo_model(tmp_path / "m", shape="wide", max_shard_bytes=40_000_000)
    model_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert model_bytes > 140e6
    command = [sys.executable, "-c", _MEASURE, str(path)]
    peak, after = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert 0.9 * model_bytes < after < 1.15 * model_bytes
    assert peak < 1.3 * model_bytes, f"{peak / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f}"
