"""A worker whose memory isn't to be trusted: an entry for the launcher in tests. Not a test module."""

from collections.abc import Callable

from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.digest import FirstDigests, LeadingDigests
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.prefill.source import SourcePart
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.handover.source import SourceHandover
from splitserve.protocol.request import Role
from splitserve.worker import entry

NUM_INTACT = 3  # hand-overs before the damaged one


def damage_one(memories: list[KVMemory]) -> None:
    """A block changes after its digest was made and before it can be read, at the end of a prompt: what comes after it
    in the prompt isn't computed from it."""
    offer = SourcePart._offer
    num_complete = 0

    def offer_and_damage(self: SourcePart, sequence: Sequence, handover: SourceHandover, now: float) -> None:
        nonlocal num_complete
        new = sequence.block_ids[handover.num_offered_blocks() :]
        is_computed = bool(self._first_tokens.of(sequence.key))
        offer(self, sequence, handover, now)
        if is_computed and not self._first_tokens.of(sequence.key):  # that was the last offer
            num_complete += 1
            if num_complete == NUM_INTACT + 1:
                memories[0].blocks[new[0]].add_(1.0)

    SourcePart._offer = offer_and_damage


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    if config.role is Role.PREFILL:
        memories: list[KVMemory] = []

        def first_digests(memory: KVMemory, wake: Callable[[], None]) -> LeadingDigests:
            memories.append(memory)
            return FirstDigests(memory, wake)

        entry.FirstDigests = first_digests
        damage_one(memories)
    entry.run_worker(config, progress)
