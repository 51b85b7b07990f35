"""The blocks of a prompt that a decode worker wants, and the check that an offer can be an answer. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.protocol.messages.handover import Offer


@dataclass(frozen=True, slots=True)
class PullSpan:
    """Destinations of one group's blocks, from prompt block ``first_block`` to the end of the prompt and its first
    output token."""

    first_block: int
    local_blocks: Sequence[int]  # held by the request and written by its reads
    block_bytes: int  # of one block on one rank


@dataclass(frozen=True, slots=True)
class Pull:
    """The blocks that a hand-over is to read, and their destinations."""

    num_prompt_tokens: int  # known to both sides
    num_cached_tokens: int  # of the first group's whole blocks, which are here already; fewer than the prompt's
    block_size: int  # tokens
    spans: Sequence[PullSpan]  # by group; the first one's begins after the cached tokens
    hashes: Sequence[
        bytes
    ] = ()  # of the first group's blocks: reads what the peer has of them already, and nothing more
    reads_host_tier: bool = False  # the peer may move what it offers to its host tier, if it has one

    def __post_init__(self) -> None:
        assert self.num_cached_tokens % self.block_size == 0 and self.num_cached_tokens < self.num_prompt_tokens
        assert self.spans[0].first_block * self.block_size == self.num_cached_tokens
        assert not self.hashes or len(self.hashes) == len(self.spans[0].local_blocks)

    def end_block(self, *, has_second_token: bool) -> int:
        """Return the number of the block behind the last one: of the prompt, or of prompt and first output token, whose
        KV comes with the second one."""
        return -(-(self.num_prompt_tokens + has_second_token) // self.block_size)


def problem_with_groups(offer: Offer, pull: Pull) -> str | None:
    """Return why an offer doesn't have the spans of this cache, in words, or None."""
    groups = [span.group for span in offer.spans]
    if groups != list(range(len(pull.spans))):
        return f"it has spans of the groups {groups}; the cache has {len(pull.spans)} groups"
    return None


def problem_with(offer: Offer, pull: Pull, num_peer_blocks: Sequence[int]) -> str | None:
    """Return why an offer can't be of what is pulled, in words, or None. ``num_peer_blocks``: how many the peer has, by
    group."""
    last_end = pull.end_block(has_second_token=offer.second_token is not None)
    for span, wanted in zip(offer.spans, pull.spans, strict=True):
        if span.first_block < wanted.first_block:
            return f"it starts at block {span.first_block}, before the granted one, {wanted.first_block}"
        end = span.first_block + len(span.blocks)
        if end > last_end:
            return f"it names {end} blocks of a prompt of {pull.num_prompt_tokens} tokens"
        num_blocks = num_peer_blocks[span.group]
        if any(not 0 <= block.block_id < num_blocks for block in span.blocks):
            return f"it names a block outside the {num_blocks} that prefill registered"
    return _problem_with_tokens(offer, pull) or _problem_with_ends(offer, pull, last_end)


def _problem_with_tokens(offer: Offer, pull: Pull) -> str | None:
    is_last = offer.last and not pull.hashes
    first = offer.spans[0]
    end_tokens = (first.first_block + len(first.blocks)) * pull.block_size
    num_known = pull.num_prompt_tokens
    if offer.second_token is not None:
        if not is_last or len(offer.first_tokens) != 1:
            return "it has a second token, but isn't the last one of a prompt with one choice"
        if any(each.num_positions != 2 for each in offer.first_logprobs):
            return "its log-probabilities aren't those of two tokens"
        num_known += 1
    if is_last:
        if offer.num_tokens != num_known:
            return f"the last one covers {offer.num_tokens} of {num_known} tokens"
        if not offer.first_tokens:
            return "the last one lacks the first token"
        end_tokens = min(end_tokens, num_known)
    if end_tokens != offer.num_tokens or offer.num_tokens > num_known:
        return f"its blocks hold {end_tokens} tokens, but it says {offer.num_tokens}"
    return None


def _problem_with_ends(offer: Offer, pull: Pull, last_end: int) -> str | None:
    """Return why the groups after the first end in the wrong place."""
    first = offer.spans[0]
    end_block = first.first_block + len(first.blocks)
    for span in offer.spans[1:]:
        end = span.first_block + len(span.blocks)
        if offer.last and not pull.hashes and end != last_end:
            return f"the last one ends at block {end} of group {span.group}, not at {last_end}"
        if span.blocks and not offer.last and end > end_block:
            return f"it names {end} blocks of group {span.group}, but {end_block} of the first"
    return None
