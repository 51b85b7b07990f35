"""``python step_memory.py CHECKPOINT DTYPE``: a CPU worker's model runs steps of many sizes in a process of its own.

Prints how many MiB of resident memory the last steps add, after a first part that has seen a third of all numbers of
tokens.
"""

import random
import sys

import psutil
import torch

from splitserve.models.parallel.ranks import Alone
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.served_model import ServedModel, load_served_model

MAX_TOKENS = 256  # of a step
BLOCK_SIZE = 16
_GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)


def serve(checkpoint: str, dtype: str) -> ServedModel:
    """Return the model as a worker with one thread loads it."""
    engine = EngineConfig(
        model=checkpoint,
        device="cpu",
        dtype=dtype,
        threads=1,
        kv_memory_bytes=8 << 20,
        max_model_len=512,
        max_num_batched_tokens=MAX_TOKENS,
    )
    served = load_served_model(engine.on("cpu"), torch.device("cpu"), Alone(), lambda _stage, _detail: None)
    served.warm_up(StartClock())
    return served


def step(chosen: random.Random, num_tokens: int, num_blocks: int) -> StepPlan:
    """Return a step of that many tokens: some sequences that decode, the rest a prompt."""
    num_decodes = chosen.randint(0, min(num_tokens, 24))
    sizes = [(chosen.randint(1, 255), 1) for _ in range(num_decodes)]
    if num_tokens > num_decodes:
        sizes.append((0, num_tokens - num_decodes))
    return StepPlan(
        [
            ScheduledChunk(
                [1] * length, start, chosen.sample(range(num_blocks), -(-(start + length) // BLOCK_SIZE)), _GREEDY
            )
            for start, length in sizes
        ]
    )


def main(checkpoint: str, dtype: str) -> None:
    """Run the steps and print the growth."""
    torch.set_num_threads(1)
    served = serve(checkpoint, dtype)
    chosen = random.Random(0)
    # Every number of tokens up to 96, then every eighth, in random order; the largest step comes first.
    sizes = [*range(1, 97), *range(104, MAX_TOKENS, 8)]
    chosen.shuffle(sizes)
    num_first = len(sizes) // 3
    resident = 0
    for index, num_tokens in enumerate([MAX_TOKENS, *sizes]):
        if index == num_first:
            resident = psutil.Process().memory_info().rss
        served.runner.run(step(chosen, num_tokens, served.memory.num_blocks))
    print((psutil.Process().memory_info().rss - resident) / 2**20)


if __name__ == "__main__":
    main(*sys.argv[1:])
