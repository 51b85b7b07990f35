"""Messages between decode and prefill workers: connections and hand-overs."""

from typing import Annotated

import msgspec

from splitserve.protocol.cache_layout import MAX_GROUPS
from splitserve.protocol.memory_records import LayoutRecord, RankMemory
from splitserve.protocol.messages.base import Message
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import RequestKey
from splitserve.protocol.wire_numbers import BlockHash, Count, Digest, Seconds, TokenId, Unsigned

MAX_RANKS = 64

MAX_HASHES = 1 << 16


class PeerHello(Message, frozen=True):
    """Decode introduces itself to a prefill worker, before its first grant."""

    layout: LayoutRecord


class PeerWelcome(Message, frozen=True):
    """The layouts match: here is what a reader needs.

    ``ranks`` are in the order of their heads (:meth:`BlockLayout.heads`); block ids mean the same on all of
    them. Generations (uint64, one per block) are in rank 0's host memory, for all ranks. Each group of the cache has
    block ids, a region and generations of its own.
    """

    layout: LayoutRecord
    connector: str
    generations_addresses: Annotated[list[Unsigned], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    ranks: Annotated[list[RankMemory], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class PeerRefused(Message, frozen=True):
    reason: str


class Grant(Message, frozen=True):
    """Decode's statement that blocks for the whole prompt are reserved, and that it already holds the KV of the first
    ``num_cached_tokens`` tokens: of full groups. Of a window group it holds none, and has room for the prompt's tail.

    Sent again to renew the lease; prefill answers each one with its current offer, or :class:`Withdrawn`.
    ``reads_host_tier``: offers may name slots of prefill's host tier.
    """

    key: RequestKey
    num_prompt_tokens: Count
    num_cached_tokens: Count
    lease_seconds: Seconds
    reads_host_tier: bool = False


class GrantRequest(Message, frozen=True):
    """Prefill's request for the grant of a prompt whose turn comes soon; see ``late_grant`` of
    :class:`splitserve.protocol.messages.requests.DecodeRequest`.

    Sent again until it is granted. The answer is :class:`Grant`, :class:`GrantDelayed`, or :class:`Release` if the
    request has ended at decode.
    """

    key: RequestKey


class GrantDelayed(Message, frozen=True):
    """Decode's answer that there is no room so far: the request is in the queue for it, in the order in which grants
    were asked for, and the grant follows."""

    key: RequestKey


class PrefixGrant(Message, frozen=True):
    """Decode has room for a prompt's blocks with these ``hashes``, from prompt block ``first_block`` on: what the
    receiver has of them, one after the other, on its device or in its host tier, it holds and offers; it computes
    nothing. The answer is one last :class:`Offer` without a first token, or :class:`Withdrawn`.

    Sent again as the lease's renewal.
    """

    key: RequestKey
    first_block: Count
    hashes: Annotated[list[BlockHash], msgspec.Meta(min_length=1, max_length=MAX_HASHES)]
    lease_seconds: Seconds


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Slots of the host tier have ids that are counted on from the device's blocks.

    ``digest`` is of the block's bytes, empty unless they are to be verified (``--verify-kv``)."""

    block_id: Count
    generation: Unsigned
    digest: Digest = b""


class OfferedSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Adjacent blocks of one cache group, from prompt block ``first_block`` on. Their ids are the group's own."""

    group: Count
    first_block: Count
    blocks: list[OfferedBlock]


class Offer(Message, frozen=True):
    """Blocks of the prompt whose KV is complete: all that decode hasn't acknowledged, a span for each cache group in
    their order. The span of a window group begins with the first block that the prompt's last token attends to.

    ``num_tokens`` counts the tokens that are covered up to the end of this offer; only the ``last`` one may end inside
    a block. ``first_tokens`` holds the first output token of each choice, in the last offer only, and
    ``first_logprobs`` their log-probabilities if the request wants them. ``second_token``: prefill has drawn another
    one of the only choice, whose log-probabilities are a second row; the offer covers the KV of the first one, too.
    ``revision`` grows when blocks that were offered have moved: the offer with the highest one is valid.
    """

    key: RequestKey
    spans: Annotated[list[OfferedSpan], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    num_tokens: Count
    last: bool = False
    first_tokens: list[TokenId] = []
    revision: Count = 0
    first_logprobs: list[Logprobs] = []
    second_token: TokenId | None = None


class OfferAck(Message, frozen=True):
    """Acknowledgement of the offers of that revision up to a prompt block for each group, in ``num_blocks``; they need
    not be read yet."""

    key: RequestKey
    num_blocks: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    last: bool
    revision: Count = 0


class Release(Message, frozen=True):
    """Decode's release of the blocks, which are read and verified (``complete``), or abandoned.

    ``mismatch``: the bytes that arrived weren't those offered; the sender's memory may be the cause.
    """

    key: RequestKey
    complete: bool
    mismatch: bool = False


class Withdrawn(Message, frozen=True):
    """The end of prefill's offers for this request.

    ``attempt_over``: the attempt has ended (its first token was its last one, or it was aborted), so decode needn't
    compute it either.
    """

    key: RequestKey
    reason: str
    attempt_over: bool = False
