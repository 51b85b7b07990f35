"""What everything in the simulator shares: its tiny model, its settings, the faults that a schedule may have.

KV is a number per position and head that depends on all tokens up to it, and a drawn token depends on all the KV that
the step reads; so a block with the wrong content anywhere gives a wrong token, which the oracle sees. Every other
worker has two ranks with a head each, which write and read at times of their own.
"""

import hashlib
from dataclasses import dataclass

import msgspec

from splitserve.kvconnector.transfer.connector import ServedMemory
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party, Role, SamplingParams

VOCAB = 50
BLOCK_SIZE = 4
NUM_HEADS = 2
LAYOUT = LayoutRecord("sim", "w", "float32", BLOCK_SIZE, 1, 1, 1)
PROTOCOL = ProtocolConfig(request_deadline_seconds=60.0, max_blocks_per_read=4, tombstone_seconds=60.0)
ROUTER = Party("router", 1)


def mix(*values: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "big")


def next_kv(kv: list[int], token: int, head: int) -> int:
    """The head's KV of the position after those of ``kv``."""
    return mix(kv[-1] if kv else 0, token, head)


def expected_output(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The tokens that a single undisturbed worker gives."""
    heads: list[list[int]] = [[] for _ in range(NUM_HEADS)]
    tokens = list(prompt)
    output: list[int] = []
    while True:
        for head, kv in enumerate(heads):
            for token in tokens[len(kv) :]:
                kv.append(next_kv(kv, token, head))
        output.append(mix(*(number for kv in heads for number in kv), sampling.seed, len(tokens)) % VOCAB)
        tokens.append(output[-1])
        if sampling.finish_reason(output[-1], len(output)):
            return output


class Faults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may go wrong in a schedule: probabilities, longest times in seconds, numbers of disasters.

    Between peers, messages are lost (``drop``), repeated and reordered; a router's link is ordered and loses messages
    only when its worker dies. Per read: ``post_error`` fails at once, ``read_error`` later, ``read_stuck`` never ends,
    ``read_late`` ends after its deadline; ``disconnect_seconds`` is how long giving reads up takes, bytes landing
    meanwhile. ``partitions`` cut pairs of workers while reads between them go on: that is how a lease runs out under a
    reader. ``mutes`` are workers that listen to their peers, but never answer, for ``partition_seconds``. ``kills``
    are followed by a restart at the same address. ``damage`` is the probability that a block arrives with other bytes,
    against which digests are verified. ``clocks`` is how far the workers' clocks are apart. With
    ``rounding`` no two workers draw the same token: a client must see one stream all the same.
    Copies between device and tiers fail with ``copy_error``, and end too late with ``copy_late``. ``lies`` is the
    probability that an offer is wrong: see :class:`simulated_lies.Liar`. ``unsent`` is the probability that a
    worker's link doesn't take a request from the router.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    max_delay: float = 0.01
    post_error: float = 0.0
    read_error: float = 0.0
    read_stuck: float = 0.0
    read_late: float = 0.0
    read_seconds: float = 0.01
    disconnect_seconds: float = 0.001
    step_error: float = 0.0
    step_seconds: float = 0.02
    abort: float = 0.0
    partitions: int = 0
    mutes: int = 0
    partition_seconds: float = 3.0
    kills: int = 0
    freezes: int = 0
    drains: int = 0
    clocks: float = 600.0
    rounding: bool = False
    damage: float = 0.0
    copy_error: float = 0.0
    copy_late: float = 0.0
    copy_seconds: float = 0.05
    lies: float = 0.0
    unsent: float = 0.0


class Shape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many workers with how many blocks each. ``prefill_blocks`` 0: as many as the others.

    ``tier_slots``: of the first tier of each; 0: there are none. ``shared_chunk``: blocks of the chunks of a tier that
    all share; 0: there is none.
    """

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    num_blocks: int = 24
    prefill_blocks: int = 0
    tier_slots: int = 0
    shared_chunk: int = 0

    def workers(self) -> list[tuple[str, Role, int]]:
        """Name, role and number of blocks of each."""
        numbers = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return [
            (f"{role}-{index}", role, (role is Role.PREFILL and self.prefill_blocks) or self.num_blocks)
            for role, number in numbers.items()
            for index in range(number)
        ]


@dataclass
class SimConnector:
    """Stands in for the connector while a core is built."""

    me: Party
    num_blocks: int
    name: str = "sim"
    num_slots: int = 0

    def served(self) -> ServedMemory:
        region = MemoryRegion(MemoryKind.DRAM, 0, 0x1000, self.num_blocks, LAYOUT.block_bytes)
        host = None
        if self.num_slots:
            slots = MemoryRegion(MemoryKind.DRAM, 0, 0x1000, self.num_slots, LAYOUT.block_bytes)
            host = HostTierMemory(slots, 0x1000)
        return ServedMemory(self.name, [0x1000], [RankMemory(str(self.me).encode(), [region], host=host)])

    def welcome(self) -> PeerWelcome:
        served = self.served()
        return PeerWelcome(LAYOUT, served.connector, list(served.generations_addresses), list(served.ranks))
