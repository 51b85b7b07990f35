"""Workloads by name, as options give them: ``2048/512``, ``chats``, ``agents``, ``trace:FILE``."""

import re
from dataclasses import dataclass

from splitserve.common.errors import ConfigError
from splitserve.workloads.conversation import Workload
from splitserve.workloads.synthetic import SYNTHETIC, Exact, Maker, make
from splitserve.workloads.traces import at_rate, read_trace

FORMS = (
    "INPUT/OUTPUT or INPUT/OUTPUT+SHARED in tokens, with ~LOW-HIGH for rates that go up and down once, in that "
    "proportion; chats, agents, or trace:FILE"
)
_EXACT = re.compile(r"(\d{1,8})/(\d{1,8})(?:\+(\d{1,8}))?(?:~(\d{1,6})-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a workload at any rate; exactly one of ``maker`` and ``trace`` is set."""

    name: str
    maker: Maker | None = None
    trace: Workload | None = None
    max_tokens: int = 0  # conversations of a trace that are longer are left out; 0: none are

    def at(self, rate: float, num_requests: int, seed: int) -> Workload:
        """Return about ``num_requests`` requests that arrive at ``rate`` per second; equal arguments, equal
        requests."""
        if self.maker is not None:
            return make(self.maker, rate, num_requests, seed)
        assert self.trace is not None
        return at_rate(self.trace, rate, num_requests, self.max_tokens)


def parse_workload(text: str, max_tokens: int = 0) -> Source:
    """Return the source that ``text`` names. Raises :class:`ConfigError` for an unknown form or impossible lengths."""
    if text in SYNTHETIC:
        return Source(text, SYNTHETIC[text]())
    kind, _, path = text.partition(":")
    if kind == "trace" and path:
        trace = read_trace(path)
        return Source(trace.name, trace=trace, max_tokens=max_tokens)
    match = _EXACT.fullmatch(text)
    if match is None:
        raise ConfigError(f"workload {text!r}: must be {FORMS}")
    num_input, num_output, num_shared, low, high = (int(number or 0) for number in match.groups())
    if not (num_input and num_output) or num_shared > num_input:
        raise ConfigError(
            f"workload {text!r}: input and output must be at least 1 token, and the shared prefix not longer than the "
            "input"
        )
    if match[4] is not None and not 0 < low < high:
        raise ConfigError(f"workload {text!r}: LOW must be above 0 and below HIGH")
    exact = Exact(num_input, num_output, num_shared, (low, high) if match[4] is not None else None)
    return Source(exact.name, exact)
