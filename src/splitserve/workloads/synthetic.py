"""Workloads made from a few numbers: prompts of exact length, chats of several turns, agents that use tools."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from splitserve.common.errors import ConfigError
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload

_SIGMA = 0.5  # of the logarithm of lengths and pauses that vary: half of them lie within 0.7 to 1.4 times the median


def arrivals(rate: float, num_arrivals: int, seed: int) -> list[float]:
    """Return the times of a Poisson process of ``rate`` per second, from 0 s on. Raises :class:`ConfigError`."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"a workload's rate must be a finite number of requests per second above 0, got {rate}")
    random = Random(f"arrivals {seed}")
    return list(itertools.accumulate((random.expovariate(rate) for _ in range(num_arrivals - 1)), initial=0.0))


def wave_arrivals(low: float, high: float, rate: float, num_arrivals: int, seed: int) -> list[float]:
    """Return the times of a Poisson process whose rate goes from its lowest to its highest value and back, like a
    cosine, once over the load. Lowest and highest are as ``low`` to ``high``, the mean is ``rate`` per second.

    Raises :class:`ConfigError` for a rate that is no rate.
    """
    even = arrivals(1.0, num_arrivals + 1, seed)  # in a time in which one request arrives per second
    depth = (high - low) / (high + low)
    period = (num_arrivals + 1) / rate
    steps = np.linspace(0.0, 1.5 * period, 30_001)
    expected = rate * (steps - depth * period / (2 * math.pi) * np.sin(2 * math.pi * steps / period))
    return [float(time) for time in np.interp(even[1:], expected, steps)]


@dataclass(frozen=True, slots=True)
class Exact:
    """Single requests of exact lengths; the first ``num_shared_tokens`` of all prompts are the same."""

    num_input_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    wave: tuple[float, float] | None = None  # rates between which arrivals go up and down; None: they don't

    @property
    def name(self) -> str:
        shared = f", {self.num_shared_tokens} shared" if self.num_shared_tokens else ""
        wave = f", rates from {self.wave[0]:g} to {self.wave[1]:g}" if self.wave else ""
        return f"{self.num_input_tokens}/{self.num_output_tokens}{shared}{wave}"

    @property
    def turns_per_conversation(self) -> float:
        return 1.0

    def conversation(self, number: int, start_seconds: float, _random: Random) -> Conversation:
        own = Piece(f"prompt {number}", self.num_input_tokens - self.num_shared_tokens)
        shared = Piece("shared", self.num_shared_tokens)
        pieces = tuple(piece for piece in (shared, own) if piece.num_tokens)
        return Conversation(str(number), start_seconds, (Turn(pieces, self.num_output_tokens),))


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations with a system prompt that all share; lengths and pauses vary around their medians."""

    num_turns: int = 4
    num_system_tokens: int = 64
    num_first_tokens: int = 512
    num_new_tokens: int = 64
    num_output_tokens: int = 128
    think_seconds: float = 2.0
    name: str = "chats"

    @property
    def turns_per_conversation(self) -> float:
        return float(self.num_turns)

    def conversation(self, number: int, start_seconds: float, random: Random) -> Conversation:
        turns = tuple(self._turns(number, random))
        return Conversation(str(number), start_seconds, turns)

    def _turns(self, number: int, random: Random) -> Iterator[Turn]:
        for turn in range(self.num_turns):
            median = self.num_new_tokens if turn else self.num_first_tokens
            new = Piece(f"{self.name} {number} turn {turn}", _around(median, random))
            pieces = (new,) if turn else (Piece(f"{self.name} system", self.num_system_tokens), new)
            think = self.think_seconds * random.lognormvariate(0.0, _SIGMA) if turn else 0.0
            yield Turn(pieces, _around(self.num_output_tokens, random), think)


AGENTS = Chats(
    num_turns=8,
    num_system_tokens=1024,
    num_first_tokens=256,
    num_new_tokens=192,  # a tool's result
    num_output_tokens=48,  # a call of a tool
    think_seconds=0.5,  # the tool's time
    name="agents",
)
"""Agents that call a tool in each turn: long shared instructions, short answers, short pauses."""

Maker = Exact | Chats


def make(maker: Maker, rate: float, num_requests: int, seed: int) -> Workload:
    """Make about ``num_requests`` requests that arrive at ``rate`` per second on average, turns included.

    The same arguments give the same workload. Raises :class:`ConfigError` for a rate that is no rate.
    """
    num_conversations = max(1, round(num_requests / maker.turns_per_conversation))
    wave = maker.wave if isinstance(maker, Exact) else None
    if wave is not None:
        starts = wave_arrivals(*wave, rate, num_conversations, seed)
    else:
        starts = arrivals(rate / maker.turns_per_conversation, num_conversations, seed)
    random = Random(f"{maker.name} {seed}")
    made = tuple(maker.conversation(number, start, random) for number, start in enumerate(starts))
    return Workload(maker.name, made)


def _around(median: int, random: Random) -> int:
    return max(1, min(8 * median, round(median * random.lognormvariate(0.0, _SIGMA))))


SYNTHETIC: dict[str, Callable[[], Maker]] = {"chats": Chats, "agents": lambda: AGENTS}
"""Workloads that need no numbers, by name."""
