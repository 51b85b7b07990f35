"""Commands to copy blocks between the device and its tiers, their results, and the copies that are in flight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from splitserve.kvconnector.tiers.shared import ChainCopy, TierState


class CopyCommand(msgspec.Struct, frozen=True, tag=True):
    """Copy whole blocks between the device and a tier: block ``block_ids[i]`` and slot ``slots[i]``."""

    copy_id: int
    tier: str
    is_load: bool  # True: into the blocks
    block_ids: Sequence[int]
    slots: Sequence[int]
    hashes: Sequence[bytes]  # hashes[i]: the content


class ClearCommand(msgspec.Struct, frozen=True, tag=True):
    """Order to forget a tier's content: no later lookup finds any of it, not even in the next incarnation. A shared
    tier out of reach forgets it before this worker uses it again."""

    tier: str


class CancelCommand(msgspec.Struct, frozen=True, tag=True):
    """Order to drop an abandoned load unless it has begun. It ends in one :class:`CopyResult` either way."""

    copy_id: int
    tier: str


class CopyResult(msgspec.Struct, frozen=True, tag=True):
    """End of a copy: nothing touches its blocks or slots any more."""

    copy_id: int
    num_good: int  # leading blocks that are correct
    error: str | None = None  # the problem of the block after them
    seconds: float = 0.0  # duration
    was_dropped: bool = False  # cancelled before it began: it shows nothing about the content
    is_full: bool = False  # a store that the tier lacked room for


@dataclass(frozen=True, slots=True)
class CopyNearsEnd:
    """Notice that the rest of a load takes no longer than a step: a step that needs the blocks may be launched, and
    waits for them on the device. The load's :class:`CopyResult` follows."""

    copy_id: int


Copy: TypeAlias = CopyCommand | ChainCopy
AnyCommand: TypeAlias = Copy | CancelCommand | ClearCommand
AnyResult: TypeAlias = CopyResult | CopyNearsEnd | TierState


class CopiesInFlight:
    """Copies in flight, by id, and the commands that are yet to be executed."""

    def __init__(self) -> None:
        self.commands: list[AnyCommand] = []
        self.next_id = 1
        self._copies: dict[int, Copy] = {}

    def start(self, copy: Copy) -> int:
        """Begin a copy whose id is :attr:`next_id`; return that id."""
        self.next_id = copy.copy_id + 1
        self._copies[copy.copy_id] = copy
        self.commands.append(copy)
        return copy.copy_id

    def cancel(self, copy: Copy) -> None:
        """Drop a copy unless it has begun; it stays in flight until its result."""
        self.commands.append(CancelCommand(copy.copy_id, copy.tier))

    def take_commands(self) -> list[AnyCommand]:
        """Return the commands since the last call, oldest first."""
        commands, self.commands = self.commands, []
        return commands

    def finish(self, copy_id: int) -> Copy:
        """Remove a copy that has ended, and return it."""
        return self._copies.pop(copy_id)

    def get(self, copy_id: int) -> Copy:
        """Return a copy that is in flight."""
        return self._copies[copy_id]

    @property
    def loads(self) -> list[Copy]:
        """Copies into the device."""
        return [copy for copy in self._copies.values() if copy.is_load]

    @property
    def stores(self) -> list[Copy]:
        """Copies out of the device."""
        return [copy for copy in self._copies.values() if not copy.is_load]

    def of_tier(self, name: str) -> list[CopyCommand]:
        """Return the copies from and to a tier with slots."""
        return [copy for copy in self._copies.values() if isinstance(copy, CopyCommand) and copy.tier == name]

    @property
    def is_idle(self) -> bool:
        """True if no copy is in flight."""
        return not self._copies
