"""Stages of a sequence in one worker, and the transitions between them."""

from enum import Enum


class Stage(Enum):
    NEW = "new"  # accepted; no part has it yet
    UNGRANTED = "ungranted"  # waits for the grant of its decode worker
    UNADMITTED = "unadmitted"  # waits for room for KV that comes from a peer
    PULLING = "pulling"  # holds room for its KV; tiers and the peer fill it
    QUEUED = "queued"  # waits for its turn to compute; may hold blocks that are being onboarded
    PREFILLING = "prefilling"  # known tokens are being computed
    DECODING = "decoding"  # draws a token in each step
    OFFERED = "offered"  # computed; holds its blocks until decode has read them
    ENDED = "ended"  # draws no more tokens; a hand-over may still hold the blocks
    RELEASED = "released"  # needs its blocks no longer: they are given back once nothing in flight touches them


_OVER = (Stage.ENDED, Stage.RELEASED)
NEXT_STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.NEW: frozenset({Stage.UNGRANTED, Stage.UNADMITTED, Stage.QUEUED, Stage.DECODING, Stage.ENDED}),
    Stage.UNGRANTED: frozenset({Stage.QUEUED, *_OVER}),
    Stage.UNADMITTED: frozenset({Stage.PULLING, Stage.ENDED}),
    Stage.PULLING: frozenset({Stage.UNADMITTED, Stage.QUEUED, Stage.PREFILLING, Stage.DECODING, Stage.ENDED}),
    Stage.QUEUED: frozenset({Stage.PULLING, Stage.PREFILLING, *_OVER}),
    Stage.PREFILLING: frozenset({Stage.QUEUED, Stage.DECODING, Stage.OFFERED, *_OVER}),
    Stage.DECODING: frozenset({Stage.QUEUED, Stage.ENDED}),
    Stage.OFFERED: frozenset(_OVER),
    Stage.ENDED: frozenset({Stage.RELEASED}),
    Stage.RELEASED: frozenset(),
}
