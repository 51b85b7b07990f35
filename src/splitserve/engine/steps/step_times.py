"""Finds steps that took far longer than steps of their size do. Pure: times come in as arguments."""

from collections import deque
from statistics import median

from splitserve.protocol.step import ScheduledChunk, StepPlan

SLOW_SECONDS = 0.5
SLOW_FACTOR = 20.0
UNKNOWN_SIZE_FACTOR = 4.0  # over the time that a size not seen before would take if time grew with its tokens
MIN_STEPS = 32
MIN_LIKE_STEPS = 8
_REMEMBERED_STEPS = 256
_REMEMBERED_LIKE_STEPS = 64


class StepTimes:
    """Remembers how long the last steps took, by size: steps are alike if their tokens have the same bit length."""

    def __init__(self) -> None:
        self._all: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_STEPS)
        self._by_size: dict[int, deque[float]] = {}

    def note(self, plan: StepPlan, seconds: float) -> str | None:
        """Note a step's time; return what was slow about it, in words, or None."""
        num_tokens = plan.num_tokens
        like = self._by_size.setdefault(num_tokens.bit_length(), deque(maxlen=_REMEMBERED_LIKE_STEPS))
        warning = self._judge(plan, seconds, like) if seconds >= SLOW_SECONDS else None
        self._all.append((seconds, num_tokens))
        like.append(seconds)
        return warning

    def _judge(self, plan: StepPlan, seconds: float, like: deque[float]) -> str | None:
        if len(self._all) < MIN_STEPS:
            return None
        if len(like) >= MIN_LIKE_STEPS:
            usual, name = median(like), "steps of its size take"
            most = SLOW_FACTOR * usual
        else:
            usual, name = median(one for one, _ in self._all), "most steps take"
            growth = plan.num_tokens / median(tokens for _, tokens in self._all)
            most = max(SLOW_FACTOR, UNKNOWN_SIZE_FACTOR * growth) * usual
        if seconds <= most:
            return None
        return f"a step took {seconds:.2f} s, where {name} {1e3 * usual:.1f} ms: {describe(plan)}"


def describe(plan: StepPlan) -> str:
    """Like ``16 decode tokens, prefill chunks of 320 tokens after 512, 64 tokens after 0``."""
    decodes, prefills = _split(plan)
    parts = [f"{len(decodes)} decode tokens"] if decodes else []
    if prefills:
        chunks = (f"{len(chunk.token_ids)} tokens after {chunk.start}" for chunk in prefills)
        parts.append("prefill chunks of " + ", ".join(chunks))
    return ", ".join(parts)


def _split(plan: StepPlan) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
    """Return the chunks that decode, and all others."""
    chunks = list(zip(plan.chunks, plan.are_decodes, strict=True))
    return [chunk for chunk, is_decode in chunks if is_decode], [chunk for chunk, is_decode in chunks if not is_decode]
