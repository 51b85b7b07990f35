"""Host memory that loading a checkpoint takes beside the model's own weights: written, loaded and measured for real.

    python tests/support/loading_memory.py KIND [--gib SIZE] [--shards N]

The checkpoint has random weights of about SIZE GiB in N files. Another process loads it with the worker's own code; its
anonymous memory (RssAnon) is read every millisecond. ``extra`` is the peak less what was there before, and less the
weights that are there after it, which on a CPU are host memory themselves. Exit status 1: ``extra`` is more than the
largest file and 2 GiB. Mapped files aren't counted: the kernel takes their pages back when it needs them. With
SPLITSERVE_FIGURES set, a record of it goes to that file.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
MARGIN_BYTES = 2 * GIB
_LOAD = """
import gc; gc.disable()
import ctypes, sys, torch
from pathlib import Path
from splitserve.models.config import load_model_config
path, backend, rank, size, device = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), torch.device(sys.argv[5])
dtype = getattr(torch, sys.argv[6])
torch.set_num_threads(1)
config = load_model_config(path, backend)
if config.transformers is None:
    from splitserve.models.parallel.ranks import Alone
    from splitserve.models.weights.loader import load_model
    from splitserve.models.weights.shard import Shard
    class OneRank(Alone):
        @property
        def shard(self):
            return Shard(rank, size)
else:
    from splitserve.models.transformers_backend import loading
gc.freeze(); gc.enable()
print("ready", flush=True); sys.stdin.readline()
if config.transformers is None:
    model = load_model(path, config, dtype=dtype, device=device, group=OneRank() if size > 1 else None)
else:
    model = loading.load_module(Path(path), dtype=dtype, device=device)
gc.collect(); ctypes.CDLL(None).malloc_trim(0)
print("loaded", flush=True); sys.stdin.readline()
"""


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def measure(
    path: Path, backend: str, rank: int = 0, size: int = 1, device: str = "cpu", dtype: str = "bfloat16"
) -> dict[str, int]:
    """Load the checkpoint ``path``, or a rank's part of it, in another process; return bytes before, at the peak and
    after, and ``extra``."""
    command = [sys.executable, "-c", _LOAD, str(path), backend, str(rank), str(size), device, dtype]
    # What is freed goes back at once: what the allocator would keep for the next time isn't held by the loader
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        before = peak = anonymous_bytes(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        assert child.stdout.readline() == "loaded\n", "loading failed"
        after = anonymous_bytes(child.pid)
        return {"before": before, "peak": peak, "after": after, "extra": peak - max(before, after)}
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def write_model(path: Path, architecture: str, sizes: dict[str, Any], shard_bytes: int) -> None:
    """Write a checkpoint in bfloat16 with random weights, in files of at most ``shard_bytes``."""
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{"tie_word_embeddings": False, "vocab_size": 32000, **sizes}, dtype="bfloat16")
    config.architectures = [architecture]
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(-0.02, 0.02)
    model.save_pretrained(path, max_shard_size=shard_bytes)


DENSE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
EXPERTS = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 4,
}
KINDS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "native": ("native", "LlamaForCausalLM", DENSE, 120 << 20),
    "transformers": ("transformers", "LlamaForCausalLM", DENSE, 120 << 20),
    "experts": ("native", "Qwen3MoeForCausalLM", EXPERTS, 200 << 20),
    "experts-transformers": ("transformers", "Qwen3MoeForCausalLM", EXPERTS, 200 << 20),
}
"""Checkpoints to load: backend, architecture, sizes, about the bytes of a layer in bfloat16."""


def write_kind(path: Path, kind: str, num_bytes: int, num_shards: int) -> str:
    """Write a checkpoint of a kind; return the backend that serves it."""
    backend, architecture, sizes, layer_bytes = KINDS[kind]
    write_model(
        path, architecture, {**sizes, "num_hidden_layers": max(2, num_bytes // layer_bytes)}, num_bytes // num_shards
    )
    return backend


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=6)
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        backend = write_kind(path, options.kind, int(options.gib * GIB), options.shards)
        files = [file.stat().st_size for file in path.glob("*.safetensors")]
        runs = (
            [("cpu", 0, 1), ("meta", 0, 1)]
            if backend == "transformers"
            else [("cpu", 0, 1), ("cpu", 0, 2), ("cpu", 1, 2)]
        )
        for device, rank, size in runs:
            found = measure(path, backend, rank, size, device)
            records.append(
                {
                    "kind": options.kind,
                    "backend": backend,
                    "device": device,
                    "rank": f"{rank + 1} of {size}",
                    "files": len(files),
                    "file_mib": sum(files) >> 20,
                    "largest_file_mib": max(files) >> 20,
                    **{f"{name}_mib": value >> 20 for name, value in found.items()},
                }
            )
            print(records[-1], flush=True)
    is_broken = any(each["extra_mib"] << 20 > (each["largest_file_mib"] << 20) + MARGIN_BYTES for each in records)
    if figures := os.environ.get("SPLITSERVE_FIGURES"):
        Path(figures).write_text(json.dumps({"loads": records}))
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
