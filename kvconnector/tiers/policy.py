"""Choice of the blocks to keep in the tiers below the device. Pure.

A policy is called for every block that becomes complete on the device, and for every block that is used again; it
returns each time whether the tiers should keep it. A block is not stored again in a tier that has it.
"""

from collections import OrderedDict
from typing import Protocol

from splitserve.protocol.engine_config import KeepPolicyName

MAX_REMEMBERED = 1 << 17


class KeepPolicy(Protocol):
    def on_complete(self, block_hash: bytes, *, is_prompt: bool) -> bool:
        """Return whether to keep a block just computed; ``is_prompt``: all of its tokens are the prompt's."""

    def on_reused(self, block_hash: bytes) -> bool:
        """Return whether to keep a block that another request has just found on the device."""


class KeepAll:
    """Policy that keeps prompts and outputs: a chat's next turn sends both again."""

    def on_complete(self, block_hash: bytes, *, is_prompt: bool) -> bool:
        del block_hash, is_prompt
        return True

    def on_reused(self, block_hash: bytes) -> bool:
        del block_hash
        return True


class KeepPrompts:
    """Policy that keeps prompts, and nothing that was generated."""

    def on_complete(self, block_hash: bytes, *, is_prompt: bool) -> bool:
        del block_hash
        return is_prompt

    def on_reused(self, block_hash: bytes) -> bool:
        del block_hash
        return True


class KeepSecondUse:
    """Policy that keeps blocks needed twice: found on the device by a second request, or computed a second time.

    It remembers the hashes of the last :data:`MAX_REMEMBERED` blocks.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def on_complete(self, block_hash: bytes, *, is_prompt: bool) -> bool:
        del is_prompt
        if block_hash in self._seen:
            self._seen.move_to_end(block_hash)
            return True
        self._seen[block_hash] = None
        if len(self._seen) > self._max_remembered:
            self._seen.popitem(last=False)
        return False

    def on_reused(self, block_hash: bytes) -> bool:
        del block_hash
        return True


def make_policy(name: str) -> KeepPolicy:
    """Return the policy of that name, a :class:`splitserve.protocol.engine_config.KeepPolicyName`."""
    policies: dict[KeepPolicyName, type[KeepPolicy]] = {
        KeepPolicyName.ALL: KeepAll,
        KeepPolicyName.SECOND_USE: KeepSecondUse,
        KeepPolicyName.PROMPT: KeepPrompts,
    }
    return policies[KeepPolicyName(name)]()
