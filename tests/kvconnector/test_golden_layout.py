"""Bytes and names of KV blocks as they have always been: peers, disks and LMCache servers hold them.

The KV write of the reference kernels fills the blocks with numbers that every dtype holds exactly, so their bytes are
the same on every machine.
"""

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.reference.operations import kv_write
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.lmcache.link import model_name_of
from splitserve.models.parallel.ranks import Alone
from splitserve.protocol.block_hash import extend_hashes, root_hash, salted_root, shard_root
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.worker.start.served_model import ServedModel, load_served_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPT = [(7919 * position + 13) % 2048 for position in range(83)]  # five full blocks of 16 tokens, and three more
BLOCK_IDS = [6, 2, 3, 9, 0, 5]  # as a pool could have given them
NUM_BLOCKS = 10


GOLDEN: dict[str, dict[str, object]] = {
    "tiny_qwen3": {
        "block bytes": 65536,
        "blocks": "7c0a150886bade9cafb093b3aedefd70",
        "layout": "6f85268ca45a9321c8d33e4d70849d76",
        "root": "5d978bf5afafbce351dbe0c6fb25d452",
        "salted root": "a09163bc8960c48648353208b738bd01",
        "chain": "ee838e817c07b1cbea129274bb1c4fdf",
        "lmcache": "splitserve-tiny-qwen3-805ca9a85752a1798d0fd4603996b97f",
    },
    "tiny_llama": {
        "block bytes": 65536,
        "blocks": "7c0a150886bade9cafb093b3aedefd70",
        "layout": "a2d8072820635e07e0b8d38a4d524d1b",
        "root": "3271e48e71dc63e2a8d4b57f947d1ef4",
        "salted root": "6c4a892308c6398a9bc72ec7fdc16232",
        "chain": "d291934bd21194e87efc4a24be04edaf",
        "lmcache": "splitserve-tiny-llama-c439bdc02224e37ea5f3430bb94268dc",
    },
}
GOLDEN_RANKS: dict[str, list[object]] = {
    "float32": [
        6144,
        "299695bd26a2ec75a083fcfc348927e8",
        "723a54936c0a282241b253eafae78042",
        "splitserve-m-b722a2bd77d51f44b426e347ba9435fe",
    ],
    "bfloat16": [
        6144,
        "d449fbe0a54299bfa5b0c29198e81bf1",
        "f3e92d3ff9ee02c98a49f16f2f1ca72e",
        "splitserve-m-229ba50ecc5868ef57bca78f8a6cef76",
    ],
    "float16": [
        1536,
        "ecce81626b73167058f79ae3ee4feb66",
        "0076654a13241192bd7d8ba051e0a047",
        "splitserve-m-109b2cce3313bcc85bfb9c86bb805def",
    ],
    "float8_e4m3fn": [
        768,
        "47c040e89bd996a24fbaf664474d7220",
        "3799c54f0fb9700cde1b077cbec9ed7d",
        "splitserve-m-bbd941969f6bbeb15fc61be0010b9b74",
    ],
}


@pytest.fixture(scope="module", params=["tiny_qwen3", "tiny_llama"])
def served(request: pytest.FixtureRequest) -> tuple[str, ServedModel]:
    return request.param, serve(request.getfixturevalue(request.param))


def serve(path: Path) -> ServedModel:
    engine = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="float32",
        block_size=16,
        kv_memory_bytes=2 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    ).on("cpu")
    return load_served_model(engine, CPU, Alone(), lambda *_: None)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def bytes_of(memory: KVMemory) -> bytes:
    return memory.blocks.view(-1).view(torch.uint8).numpy().tobytes()


def write_prompt(layers: list[torch.Tensor], shape: AttentionShape) -> None:
    """Write keys and values of :data:`PROMPT` through the kernel: small integers that name token, layer, head, part and
    dimension."""
    positions = torch.arange(len(PROMPT))
    slots = shape.slots(torch.tensor(BLOCK_IDS)[positions // shape.block_size], positions % shape.block_size)
    token = torch.tensor(PROMPT)[:, None, None]
    head, dim = torch.arange(shape.num_kv_heads)[None, :, None], torch.arange(shape.head_dim)[None, None, :]
    for number, layer in enumerate(layers):
        key = (token + 3 * number + 5 * head + dim) % 31 - 15
        value = (token + 11 * number + 7 * head + 2 * dim) % 29 - 14
        kv_write(layer, key.to(shape.dtype), value.to(shape.dtype), slots)


def test_a_served_models_blocks_have_the_bytes_and_names_they_always_had(served: tuple[str, ServedModel]) -> None:
    name, model = served
    memory, runner = model.memory, model.runner
    memory.blocks.zero_()
    write_prompt(runner.cache.kv_layers, runner.cache.shapes[0])
    written = bytes_of(memory)
    layout = msgspec.structs.replace(memory.layout, weights_version="w1")
    dimensions = msgspec.structs.asdict(layout)
    assert dimensions.pop("groups") == (), "a cache of one full group isn't described twice"
    assert layout.model == {"tiny_qwen3": "tiny-qwen3", "tiny_llama": "tiny-llama"}[name]
    size = NUM_BLOCKS * memory.block_bytes
    assert len(written) == memory.num_blocks * memory.block_bytes and not any(written[size:])
    assert {
        "block bytes": memory.block_bytes,
        "blocks": digest(written[:size]),
        "layout": digest(msgspec.msgpack.encode(dimensions)),
        "root": root_hash(layout).hex(),
        "salted root": salted_root(root_hash(layout), "tenant").hex(),
        "chain": digest(b"".join(chain_of(layout))),
        "lmcache": model_name_of(layout),
    } == GOLDEN[name]


def chain_of(layout: LayoutRecord) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(layout), PROMPT, layout.block_size)
    return hashes


@pytest.mark.parametrize(
    ("dtype", "num_ranks"), [("float32", 2), ("bfloat16", 1), ("float16", 4), ("float8_e4m3fn", 8)]
)
def test_blocks_of_every_dtype_and_rank(dtype: str, num_ranks: int) -> None:
    layout = LayoutRecord("m", "w", dtype, 16, 3, 4, 8, tensor_parallel_size=num_ranks)
    heads = max(1, 4 // num_ranks)
    memory = KVMemory(layout, NUM_BLOCKS)
    torch_dtype = getattr(torch, dtype)
    typed = memory.blocks.view(-1).view(torch.uint8).view(torch_dtype).view(NUM_BLOCKS, 3, heads, 2, 16, 8)
    write_prompt(
        [typed[:, layer] for layer in range(3)],
        AttentionShape(heads, heads, 8, 16, 3, torch.float32, CPU),
    )
    names = [shard_root(layout, num_ranks - 1).hex(), model_name_of(layout, num_ranks - 1)]
    assert [memory.block_bytes, digest(bytes_of(memory)), *names] == GOLDEN_RANKS[dtype]
