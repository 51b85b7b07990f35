"""Check of the memory that a peer declares, before it is used: contradictions, numbers beyond all bounds. Pure."""

from collections.abc import Sequence
from functools import partial

from splitserve.common.errors import HandshakeError
from splitserve.protocol.memory_records import MemoryKind, MemoryRegion
from splitserve.protocol.messages.handover import PeerWelcome

MAX_PEER_BLOCKS = 1 << 22  # bounds the memory that a peer's declaration makes us allocate: 56 bytes per block
MAX_PEER_SLOTS = 1024
MAX_METADATA_BYTES = 1 << 20
_ADDRESS_SPACE_BYTES = 1 << 64


def problem_with_memory(welcome: PeerWelcome) -> str | None:
    """Return the contradiction in a peer's declaration of its memory, in words, or None."""
    layout = welcome.layout
    if len(welcome.ranks) != layout.tensor_parallel_size:
        return f"it declares the memory of {len(welcome.ranks)} ranks, but has {layout.tensor_parallel_size}"
    numbers = {len(welcome.generations_addresses), *(len(rank.regions) for rank in welcome.ranks)}
    if numbers != {len(layout.cache.groups)}:
        return f"its cache has {len(layout.cache.groups)} groups, but it declares the memory of {sorted(numbers)}"
    if any(rank.gather or rank.host or rank.mappable for rank in welcome.ranks) and not layout.cache.is_simple:
        return "a cache of several groups or fields has neither gather slots, nor a readable host tier, nor mappings"
    for field in (field for group in layout.cache.groups for field in group.fields):
        if not field.splits_over(layout.tensor_parallel_size):
            ranks = layout.tensor_parallel_size
            return f"its {ranks} ranks cannot share the {field.num_heads} heads of {field.name!r} evenly"
    problem = next(filter(None, map(partial(_problem_with_group, welcome), range(len(layout.cache.groups)))), None)
    if problem:
        return problem
    for host in (rank.host for rank in welcome.ranks if rank.host is not None):
        if layout.tensor_parallel_size > 1:
            return "it has several ranks and a readable host tier; only a worker of one rank may have one"
        if host.slots.kind is not MemoryKind.DRAM or host.slots.block_bytes != layout.block_bytes:
            return f"its host tier has slots of {host.slots.block_bytes} bytes in {host.slots.kind.words}"
    if len({region.kind for rank in welcome.ranks for region in rank.regions}) != 1:
        return "some of its blocks are in host memory, others on a GPU"
    return None


def _problem_with_group(welcome: PeerWelcome, group: int) -> str | None:
    regions = [rank.regions[group] for rank in welcome.ranks]
    if len({region.num_blocks for region in regions}) != 1:
        return f"its ranks have different numbers of blocks: {[region.num_blocks for region in regions]}"
    if regions[0].num_blocks < 1:
        return "it registered no blocks"
    implied = welcome.layout.cache.blocks(group).block_bytes
    for region in regions:
        if region.block_bytes != implied:
            return f"its blocks have {region.block_bytes} bytes, but its layout implies {implied}"
    return None


def _check_group(regions: Sequence[MemoryRegion], generations_address: int, kind: MemoryKind) -> None:
    if regions[0].num_blocks > MAX_PEER_BLOCKS:
        raise HandshakeError(
            f"the peer claims {regions[0].num_blocks} KV blocks; at most {MAX_PEER_BLOCKS} are accepted"
        )
    if regions[0].kind is not kind:
        theirs, ours = regions[0].kind.words, kind.words
        raise HandshakeError(f"the peer's KV blocks are in {theirs}, ours in {ours}: both sides need the same --device")
    named = [(f"blocks of rank {rank}", region.blocks_address, region.num_bytes) for rank, region in enumerate(regions)]
    for name, address, size in (*named, ("generations", generations_address, regions[0].num_blocks * 8)):
        if not 0 < address <= _ADDRESS_SPACE_BYTES - size:
            raise HandshakeError(f"the peer's {name} can't be {size} bytes at address {address:#x}")


def check_welcome(welcome: PeerWelcome, kind: MemoryKind) -> None:
    """Raise :class:`HandshakeError` for numbers that no peer's memory can have, or if it can't be read into memory of
    ``kind``.

    Nothing more can be checked here. NIXL checks against the peer's metadata, before it reads a byte, that the
    addresses are those that the peer registered.
    """
    problem = problem_with_memory(welcome)
    if problem:
        raise HandshakeError(f"the peer contradicts itself: {problem}")
    for group, generations_address in enumerate(welcome.generations_addresses):
        _check_group([rank.regions[group] for rank in welcome.ranks], generations_address, kind)
    for gather in (rank.gather for rank in welcome.ranks if rank.gather is not None):
        if gather.slots.kind is not kind or not 0 < gather.slots.num_blocks <= MAX_PEER_SLOTS:
            raise HandshakeError(
                f"the peer's {gather.slots.num_blocks} gather slots in {gather.slots.kind.words} aren't possible"
            )
        if not 0 < gather.tickets_address <= _ADDRESS_SPACE_BYTES - MAX_PEER_SLOTS * 8:
            raise HandshakeError(f"the peer's tickets can't be at address {gather.tickets_address:#x}")
    for host in (rank.host for rank in welcome.ranks if rank.host is not None):
        if host.slots.num_blocks > MAX_PEER_BLOCKS:
            raise HandshakeError(
                f"the peer claims {host.slots.num_blocks} slots; at most {MAX_PEER_BLOCKS} are accepted"
            )
        ends = (host.slots.blocks_address + host.slots.num_bytes, host.generations_address + host.slots.num_blocks * 8)
        if min(host.slots.blocks_address, host.generations_address) < 1 or max(ends) > _ADDRESS_SPACE_BYTES:
            raise HandshakeError("the peer's host tier can't be at the addresses that it names")
    for metadata in (rank.metadata for rank in welcome.ranks):
        if len(metadata) > MAX_METADATA_BYTES:
            raise HandshakeError(f"the peer's metadata has {len(metadata)} bytes; at most {MAX_METADATA_BYTES}")
