"""A worker whose memory isn't to be trusted: an entry for the launcher in tests. Not a test module."""

from collections.abc import Callable, Sequence

from splitserve.config import WorkerConfig
from splitserve.decode import entry
from splitserve.kvconnector.digest import FirstDigests, LeadingDigests
from splitserve.kvconnector.memory import KVMemory
from splitserve.request import Role

NUM_INTACT = 3  # offers before the damaged one


def damaging_digests(memory: KVMemory, wake: Callable[[], None]) -> LeadingDigests:
    """Digests that are right when they're made; one block changes right after that."""
    first_digests = FirstDigests(memory, wake)
    num_offers = 0

    def leading_digests(block_ids: Sequence[int]) -> list[bytes]:
        nonlocal num_offers
        digests = first_digests(block_ids)
        num_offers += bool(digests)
        if digests and num_offers == NUM_INTACT + 1:
            memory.blocks[block_ids[0]].add_(1.0)
        return digests

    return leading_digests


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    if config.role is Role.PREFILL:
        entry.FirstDigests = damaging_digests
    entry.run_worker(config, progress)
