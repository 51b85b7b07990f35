"""Arms of a comparison: arrangements of the same number of devices, with a policy and a chunk budget each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.placement.policies import PLACEMENT_POLICIES

LOAD_POLICY = "least-loaded"
PREFIX_POLICY = "prefix"
CONDITIONAL_POLICY = "cost"
FORMS = "xPyD or nM (mixed), with @TOKENS for the chunk budget and :POLICY, like 1P1D:cost or 2M@512:prefix"
_FORM = re.compile(r"(?:(\d{1,3})P(\d{1,3})D|(\d{1,3})M)(?:@(\d{1,7}))?(?::([a-z-]+))?")


@dataclass(frozen=True, slots=True)
class Arm:
    """An arrangement of workers. ``chunk_tokens``: the most tokens of a step, those of prompts beside sequences that
    decode included; 0 for the engine's own choice."""

    num_prefill: int = 0
    num_decode: int = 0
    num_mixed: int = 0
    policy: str = LOAD_POLICY
    chunk_tokens: int = 0

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_mixed

    @property
    def is_mixed(self) -> bool:
        return not self.num_prefill

    @property
    def is_conditional(self) -> bool:
        """Return whether the policy chooses, request by request, if prefill and decode run apart."""
        return not self.is_mixed and self.policy == CONDITIONAL_POLICY

    def engine(self, engine: EngineConfig) -> EngineConfig:
        """Return ``engine`` with the arm's chunk budget."""
        if not self.chunk_tokens:
            return engine
        return msgspec.structs.replace(
            engine,
            max_num_batched_tokens=self.chunk_tokens,
            max_num_prefill_tokens_beside_decode=self.chunk_tokens,
        )

    @property
    def name(self) -> str:
        """The arm as :func:`parse_arm` reads it."""
        workers = f"{self.num_mixed}M" if self.is_mixed else f"{self.num_prefill}P{self.num_decode}D"
        budget = f"@{self.chunk_tokens}" if self.chunk_tokens else ""
        return f"{workers}{budget}:{self.policy}"

    @property
    def words(self) -> str:
        """The arm in words, for a report."""
        workers = f"{self.num_mixed} mixed" if self.is_mixed else f"{self.num_prefill}P{self.num_decode}D"
        kind = ", conditional" if self.is_conditional else f", {self.policy}"
        budget = f", chunks of {self.chunk_tokens}" if self.chunk_tokens else ""
        return f"{workers}{kind}{budget}"


def parse_arm(text: str) -> Arm:
    """Parse an arm's name. Raises :class:`ConfigError` for an unknown form or policy."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"arm {text!r}: must be {FORMS}")
    num_prefill, num_decode, num_mixed, chunk_tokens = (int(number or 0) for number in match.groups()[:4])
    policy = match[5] or LOAD_POLICY
    if policy not in PLACEMENT_POLICIES:
        raise ConfigError(f"arm {text!r}: policy must be one of {', '.join(PLACEMENT_POLICIES)}, got {policy!r}")
    if not num_mixed and not (num_prefill and num_decode):
        raise ConfigError(f"arm {text!r}: needs a mixed worker, or at least one prefill and one decode worker")
    return Arm(num_prefill, num_decode, num_mixed, policy, chunk_tokens)


def default_arms(num_devices: int, chunk_budgets: Sequence[int]) -> list[Arm]:
    """Return mixed workers with the engine's own chunks and each budget, and each xPyD split of ``num_devices``, both
    with a policy that knows loads only and one that knows prefixes, and each split with conditional disaggregation."""
    if num_devices < 2:
        raise ConfigError(f"a comparison needs at least 2 devices, got {num_devices}: one can't be split")
    policies = (LOAD_POLICY, PREFIX_POLICY)
    mixed = [
        Arm(num_mixed=num_devices, policy=policy, chunk_tokens=tokens)
        for policy in policies
        for tokens in dict.fromkeys((0, *chunk_budgets))
    ]
    splits = [
        Arm(num_prefill, num_devices - num_prefill, policy=policy)
        for num_prefill in range(1, num_devices)
        for policy in (*policies, CONDITIONAL_POLICY)
    ]
    return mixed + splits


def check_equal_devices(arms: Sequence[Arm]) -> int:
    """Return the number of devices of all arms. Raises :class:`ConfigError` if they differ: then nothing is fair."""
    numbers = {arm.num_workers for arm in arms}
    if len(numbers) != 1:
        listed = ", ".join(f"{arm.name} has {arm.num_workers}" for arm in arms)
        raise ConfigError(f"arms must have the same number of devices: {listed}")
    return numbers.pop()
