"""KV events as they travel: what a worker holds, as it changes. Specified in docs/guides/kv-events.md."""

from typing import Annotated, Literal

import msgspec

TOPIC = b"kv"
DEVICE = "device"
MAX_TIER_NAME = 32


class KVEvent(msgspec.Struct, frozen=True):
    """Blocks that ``tier`` holds from now on (``stored``), or no longer (``evicted``), by their chained hashes."""

    kind: Literal["stored", "evicted"]
    tier: Annotated[str, msgspec.Meta(max_length=MAX_TIER_NAME)]
    hashes: list[bytes]


class KVEventBatch(msgspec.Struct, frozen=True):
    """One published message.

    ``number`` counts the batches of this ``incarnation`` from 1 on; the hash chains start from ``root_hash`` and cover
    ``block_size`` tokens each. ``is_snapshot``: the events are all that can be found now, up to and including batch
    ``number``, and what was known before is void.
    """

    engine_id: str
    incarnation: int
    number: int
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    root_hash: bytes
    is_snapshot: bool
    events: list[KVEvent]
