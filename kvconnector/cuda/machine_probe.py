"""Probe of this machine by PyTorch: its GPUs, peer access between them, the speed of a plain copy.

Runs as a separate process (``python -m splitserve.kvconnector.cuda.machine_probe --bytes N``), for commands that don't
load PyTorch themselves. Prints one line of JSON:

    {"torch": "2.13.0", "cuda": "13.0" or null, "gpus": [{"name": ..., "memory_bytes": ...}],
     "peer_access": [[from, to, true], ...], "copied": "host memory", "copy_bytes_per_second": 3.1e9}

``copy_bytes_per_second`` is the best of a few copies of N bytes: from one GPU to the next if there are two, else within
one GPU, else within host memory. With N = 0 nothing is copied.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

_ROUNDS = 5
_CACHE_BYTES = 128 << 20  # more than the caches hold


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args(argv)
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "peer_access": []}
    num_gpus = torch.cuda.device_count() if options.device == "auto" and torch.cuda.is_available() else 0
    for index in range(num_gpus):
        properties = torch.cuda.get_device_properties(index)
        facts["gpus"].append({"name": properties.name, "memory_bytes": properties.total_memory})
    pairs = [(one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other]
    facts["peer_access"] = [[one, other, torch.cuda.can_device_access_peer(one, other)] for one, other in pairs]
    if options.bytes:
        source, target, copied = _devices(num_gpus)
        facts["copied"] = copied
        facts["copy_bytes_per_second"] = copy_speed(source, target, options.bytes)
    print(json.dumps(facts), flush=True)
    return 0


def _devices(num_gpus: int) -> tuple[torch.device, torch.device, str]:
    if num_gpus == 0:
        return torch.device("cpu"), torch.device("cpu"), "host memory"
    if num_gpus == 1:
        return torch.device("cuda", 0), torch.device("cuda", 0), "one GPU's memory"
    return torch.device("cuda", 0), torch.device("cuda", 1), "GPU 0 to GPU 1"


def copy_speed(source: torch.device, target: torch.device, num_bytes: int) -> float:
    """Return the bytes per second of the best of a few copies of ``num_bytes``. The memory has been touched but is in
    no cache, like another process's KV."""
    torch.set_num_threads(1)  # one thread, like a connector's
    theirs = torch.ones(num_bytes, dtype=torch.uint8, device=source)
    mine = torch.zeros(num_bytes, dtype=torch.uint8, device=target)
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=source)
    best = float("inf")
    for _ in range(_ROUNDS):
        others.add_(1)
        _wait(source, target)
        started = time.perf_counter()
        mine.copy_(theirs)
        _wait(source, target)
        best = min(best, time.perf_counter() - started)
    return num_bytes / max(best, 1e-9)


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
