"""Faults and sizes of a simulated cluster: plain values from which a run can be repeated."""

import msgspec

from splitserve.protocol.request import Role


class Faults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Faults of a run: probabilities, longest times in seconds, numbers of disasters.

    Only messages between peers get lost, repeated or reordered: a router's link keeps the order, and loses messages
    only when its worker dies.
    """

    drop: float = 0.0  # probability that a message between peers is lost
    duplicate: float = 0.0  # probability that it arrives twice
    max_delay: float = 0.01  # longest time that it takes
    post_error: float = 0.0  # probability that a read fails at once
    read_error: float = 0.0  # probability that a read fails later
    read_stuck: float = 0.0  # probability that a read never ends
    read_late: float = 0.0  # probability that a read ends after its deadline
    read_seconds: float = 0.01  # longest time from one block of a read to the next
    disconnect_seconds: float = 0.001  # longest time that cancelling reads takes; their bytes still land meanwhile
    step_error: float = 0.0  # probability that a step fails, having written anything to its blocks
    step_seconds: float = 0.02  # longest time that a step takes
    abort: float = 0.0  # probability that a client leaves early
    partitions: int = 0  # pairs of workers that are cut off; reads between them go on, so leases expire under readers
    mutes: int = 0  # workers that receive their peers' messages, but send none, for partition_seconds
    partition_seconds: float = 3.0
    kills: int = 0  # workers that die, and restart at the same address
    handover_kills: int = 0  # workers that die shortly after an offer, while blocks move
    freezes: int = 0  # workers that stop for a while, as by SIGSTOP
    drains: int = 0  # workers that drain, as by SIGTERM, and restart
    operator_drains: int = 0  # workers that operators let drain through a router
    clocks: float = 600.0  # largest offset of a worker's clock
    rounding: bool = False  # no two workers draw the same token; each client sees one stream all the same
    damage: float = 0.0  # probability that a block arrives with other bytes; digests are verified against it
    copy_error: float = 0.0  # probability that a copy between device and tier fails
    copy_late: float = 0.0  # probability that a load from a tier ends after its deadline
    copy_seconds: float = 0.05  # longest time that a copy takes otherwise
    lies: float = 0.0  # probability that an offer is wrong: see splitserve.simulation.lies
    scored: bool = False  # no fault: requests want log-probabilities, of the output, the prompt, or both
    unsent: float = 0.0  # probability that a worker's link rejects a request from the router
    pauses: int = 0  # by an operator, in any mode, each for up to 3 s; half of them are asked for and ended twice
    resets: int = 0  # of the prefix caches
    router_kills: int = 0  # routers other than the first one that die, and start again


class Shape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes of a cluster."""

    prefill: int = 1  # workers of this role
    decode: int = 1
    mixed: int = 0
    num_blocks: int = 24  # of each worker
    prefill_blocks: int = 0  # of each prefill worker; 0: num_blocks
    tier_slots: int = 0  # of each worker's first tier; 0: there are no tiers
    window: int = 0  # tokens that the layers of a second group attend to; 0: there is only a full group
    shared_chunk: int = 0  # blocks per chunk of a tier that all workers share; 0: there is none
    policy: str = "least-loaded"  # of placement
    routers: int = 1  # on one port

    def workers(self) -> list[tuple[str, Role, int]]:
        """Return name, role and number of blocks of each worker."""
        numbers = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return [
            (f"{role}-{index}", role, (role is Role.PREFILL and self.prefill_blocks) or self.num_blocks)
            for role, number in numbers.items()
            for index in range(number)
        ]
