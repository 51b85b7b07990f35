"""A request on a replayed worker, and the KV memory of a worker's requests."""

from dataclasses import dataclass

from splitserve.simulation.replay.cache import ReplayCache
from splitserve.simulation.replay.workload import ReplayRequest


@dataclass(slots=True, eq=False)
class Job:
    """One attempt at a request, on one worker."""

    request_id: str
    request: ReplayRequest
    decodes_here: bool
    num_known: int  # tokens whose KV is to be here before the next one is drawn
    num_computed: int = 0
    num_cached: int = 0  # tokens found in the worker's cache
    num_drawn: int = 0
    queued_at: float = 0.0
    begun_at: float = 0.0
    ready_at: float = 0.0  # its blocks are onboarded
    own_seconds: float = 0.0  # time of its prefill, alone on this worker
    last_token_at: float = 0.0
    is_granted: bool = True
    decode: str = ""  # the worker that is to grant it
    asked_at: float | None = None  # for the grant
    reserved_at: float = 0.0
    source: ReplayCache | None = None  # of another worker, to read a prefix from


@dataclass(slots=True)
class Memory:
    """KV memory of a worker's requests, and its token seconds."""

    used_tokens: int = 0
    token_seconds: float = 0.0
    empty_token_seconds: float = 0.0  # reserved, before KV arrived
    changed_at: float = 0.0

    def change(self, num_tokens: int, now: float) -> None:
        """Add tokens, or take them off."""
        self.token_seconds += self.used_tokens * (now - self.changed_at)
        self.used_tokens += num_tokens
        self.changed_at = now
