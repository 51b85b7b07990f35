"""Generated workloads: single prompts and conversations of random lengths, with Poisson arrivals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.simulation.replay.workload import BLOCK_TOKENS, ReplayRequest

Range = tuple[int, int]
"""Bounds of a uniform distribution of whole numbers."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations: each turn's prompt begins with all before it. One turn: single prompts."""

    first_tokens: Range  # of the first prompt, without what all share
    output_tokens: Range
    num_turns: int = 1
    new_tokens: Range = (0, 0)  # of each later turn
    think_seconds: float = 0.0  # mean time between an answer's end and the next turn
    shared_tokens: int = 0  # of a system prompt that all conversations begin with
    are_named: bool = True  # clients send a key

    def requests(self, count: int, rate: float, seed: int, name: str = "c") -> list[ReplayRequest]:
        """Return ``count`` conversations that begin with ``rate`` per second."""
        chosen = random.Random(f"{name} {seed}")
        requests: list[ReplayRequest] = []
        arrives_at = 0.0
        for number in range(count):
            arrives_at += chosen.expovariate(rate)
            self._add(requests, f"{name}{number}", arrives_at, chosen)
        return requests

    def _add(self, requests: list[ReplayRequest], name: str, arrives_at: float, chosen: random.Random) -> None:
        lengths, num_tokens = [], self.shared_tokens
        for turn in range(self.num_turns):
            num_tokens += chosen.randint(*(self.new_tokens if turn else self.first_tokens))
            output = chosen.randint(*self.output_tokens)
            lengths.append((num_tokens, output))
            num_tokens += output
        blocks = self._names(name, num_tokens // BLOCK_TOKENS)
        session = name if self.are_named and self.num_turns > 1 else ""
        for turn, (prompt, output) in enumerate(lengths):
            wait = chosen.expovariate(1.0 / self.think_seconds) if turn and self.think_seconds else 0.0
            before = len(requests) - 1 if turn else None
            requests.append(ReplayRequest(wait if turn else arrives_at, prompt, output, blocks, session, before))

    def _names(self, name: str, count: int) -> Sequence[bytes]:
        num_shared = self.shared_tokens // BLOCK_TOKENS
        return [b"all/%d" % n if n < num_shared else f"{name}/{n}".encode() for n in range(count)]


def merged(*workloads: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Return several workloads as one."""
    requests: list[ReplayRequest] = []
    for workload in workloads:
        offset = len(requests)
        for each in workload:
            follows = None if each.follows is None else each.follows + offset
            requests.append(
                ReplayRequest(
                    each.arrives_at,
                    each.num_prompt_tokens,
                    each.num_output_tokens,
                    each.blocks,
                    each.session,
                    follows,
                )
            )
    return requests
