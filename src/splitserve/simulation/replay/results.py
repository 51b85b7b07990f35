"""Figures of a replay."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from splitserve.simulation.replay.cache import ReplayCache
from splitserve.simulation.replay.job import Memory
from splitserve.simulation.replay.worker import WorkerFigures
from splitserve.simulation.replay.workload import BLOCK_TOKENS, ReplayRequest

_Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class RequestFigures:
    """Figures of one request; times in seconds of the replay."""

    arrived_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    own_seconds: float = 0.0  # its prefill, alone on its worker with what that had cached
    cached_tokens: int = 0
    prefill: str = ""  # the worker that computed its prompt
    is_local: bool = False


@dataclass(slots=True)
class ReplayResult:
    """Figures of all requests, workers and gaps between tokens."""

    requests: list[RequestFigures] = field(default_factory=list)
    workers: dict[str, WorkerFigures] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)
    num_ended: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    block_tokens: int = BLOCK_TOKENS
    _gaps: dict[float, int] = field(default_factory=dict)

    def on_gap(self, seconds: float, count: int) -> None:
        """Note gaps between tokens, to a thousandth."""
        rounded = float(f"{seconds:.3e}")
        self._gaps[rounded] = self._gaps.get(rounded, 0) + count

    # ---- figures ----

    @property
    def ttft_seconds(self) -> _Floats:
        """Times to first token."""
        return np.array([each.first_token_at - each.arrived_at for each in self.requests])

    @property
    def queue_seconds(self) -> _Floats:
        """Times to first token less the requests' own prefill."""
        times = [each.first_token_at - each.arrived_at - each.own_seconds for each in self.requests]
        return np.array([max(0.0, seconds) for seconds in times])

    @property
    def hit_blocks(self) -> int:
        """Prompt blocks that were found in the cache of the worker that computed the prompt."""
        return sum(each.cached_tokens for each in self.requests) // self.block_tokens

    def gap_percentile(self, percent: float) -> float:
        """Return a percentile of the gaps between tokens, in seconds."""
        if not self._gaps:
            return 0.0
        values = np.array(sorted(self._gaps))
        counts = np.cumsum([self._gaps[value] for value in values])
        return float(values[np.searchsorted(counts, counts[-1] * percent / 100.0)])

    def queue_by_worker(self) -> dict[str, float]:
        """Return the mean queueing time of the prompts of each worker that had any."""
        return {
            name: figures.queue_seconds / figures.num_prompts
            for name, figures in self.workers.items()
            if figures.num_prompts
        }

    def empty_share(self, names: Iterable[str]) -> float:
        """Return the share of the workers' KV token seconds that was reserved but empty."""
        memories = [self.memories[name] for name in names]
        total = sum(memory.token_seconds for memory in memories)
        return sum(memory.empty_token_seconds for memory in memories) / total if total else 0.0


def pooled_hits(requests: Iterable[ReplayRequest], capacity_tokens: int) -> int:
    """Return the blocks found again if all workers shared one cache of ``capacity_tokens``, least recently used out:
    the most that placement could reach."""
    cache, hits = ReplayCache(capacity_tokens // BLOCK_TOKENS, 0), 0
    for request in requests:
        blocks = request.blocks[: request.num_full_blocks(request.num_prompt_tokens - 1)]
        hits += cache.match(blocks).num_blocks
        cache.add(request.blocks[: request.num_full_blocks(request.num_prompt_tokens)])
    return hits


def percentile(values: "_Floats | Sequence[float]", percent: float) -> float:
    """Return a percentile; 0 of nothing."""
    return float(np.percentile(values, percent)) if len(values) else 0.0
