"""A worker whose memory isn't to be trusted: an entry for the launcher in tests. Not a test module."""

from collections.abc import Callable, Sequence

from splitserve.config import WorkerConfig
from splitserve.decode import entry
from splitserve.kvconnector.digest import DigestBlocks, first_digests_of
from splitserve.kvconnector.memory import KVMemory
from splitserve.request import Role

NUM_INTACT = 3  # offers before the damaged one


def damaging_digests_of(memory: KVMemory) -> DigestBlocks:
    """Digests that are right when they're made; one block changes right after that."""
    first_digests = first_digests_of(memory)
    num_calls = 0

    def digest_blocks(block_ids: Sequence[int]) -> list[bytes]:
        nonlocal num_calls
        digests = first_digests(block_ids)
        num_calls += 1
        if num_calls == NUM_INTACT + 1:
            memory.blocks[block_ids[0]].add_(1.0)
        return digests

    return digest_blocks


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    if config.role is Role.PREFILL:
        entry.first_digests_of = damaging_digests_of
    entry.run_worker(config, progress)
