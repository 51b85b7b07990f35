"""Which path the data of a read takes, by what each would cost on this link. Pure."""

from dataclasses import dataclass

from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.protocol.handover.reads import ReadPath


@dataclass(frozen=True, slots=True)
class ReadShape:
    """What reads from one peer look like. ``num_spans`` of its ranks have heads of ours; its blocks go through
    ``slots_per_half`` slots where they aren't whole blocks of ours. ``blocks_per_gather`` are put together at once by
    the source, 0 if it doesn't. ``is_mapped``: our GPU can copy from the peer's memory."""

    is_whole: bool
    num_spans: int
    num_layers: int
    local_block_bytes: int
    source_block_bytes: int
    slots_per_half: int
    blocks_per_gather: int
    is_mapped: bool = False


GATHER_MUST_SAVE = 0.2
"""Of the time: it also takes the source's."""
TRANSPORT_MUST_SAVE = 0.2
"""Of the time that copies through a mapping take: a large read's rate is known from a smaller one's, no better than so;
and a transport has to be polled."""
KERNEL_MUST_SAVE = 0.1
"""Of the time that copy engines take: it has multiprocessors that the steps beside it would use."""


def choose_path(shape: ReadShape, cost: ReadCost, num_blocks: int, num_runs: int = 0) -> ReadPath:
    seconds = path_seconds(shape, cost, num_blocks, num_runs)
    if ReadPath.GATHERED in seconds:
        seconds[ReadPath.GATHERED] /= 1.0 - GATHER_MUST_SAVE
    if ReadPath.MAPPED in seconds:
        seconds[ReadPath.MAPPED] *= 1.0 - TRANSPORT_MUST_SAVE
    if ReadPath.KERNEL in seconds:
        seconds[ReadPath.KERNEL] *= (1.0 - TRANSPORT_MUST_SAVE) / (1.0 - KERNEL_MUST_SAVE)
    return min(seconds, key=lambda path: seconds[path])


def path_seconds(shape: ReadShape, cost: ReadCost, num_blocks: int, num_runs: int = 0) -> dict[ReadPath, float]:
    """What reading ``num_blocks`` blocks would take, by each path that could be taken. They are ``num_runs`` runs of
    blocks that are adjacent on both sides, 0: each one is a run of its own."""
    num_bytes = num_blocks * shape.local_block_bytes
    num_reads = shape.num_spans * -(-num_blocks // shape.slots_per_half)
    num_sources = shape.num_spans * num_blocks
    seconds: dict[ReadPath, float] = {}
    if shape.is_whole:
        seconds[ReadPath.DIRECT] = cost.transport.seconds(1, num_blocks, num_bytes)
    else:
        seconds[ReadPath.LAYERS] = cost.transport.seconds(shape.num_spans, num_sources * shape.num_layers, num_bytes)
        seconds[ReadPath.STAGED] = cost.transport.seconds(
            num_reads, num_sources, num_sources * shape.source_block_bytes
        )
        seconds[ReadPath.STAGED] += cost.copy.seconds(num_reads, num_bytes)
    if shape.blocks_per_gather and cost.gather is not None:
        num_gathers = shape.num_spans * -(-num_blocks // shape.blocks_per_gather)
        seconds[ReadPath.GATHERED] = (
            cost.gather.seconds(1, num_bytes // num_gathers)  # the later ones run beside the reads before them
            + cost.transport.seconds(2 * num_gathers, 2 * num_gathers, num_bytes)
            + cost.copy.seconds(num_gathers, num_bytes)
        )
    if shape.is_mapped and cost.mapped is not None:
        seconds[ReadPath.MAPPED] = cost.mapped.seconds(1, shape.num_spans * (num_runs or num_blocks), num_bytes)
    if shape.is_mapped and cost.kernel is not None:
        seconds[ReadPath.KERNEL] = cost.kernel.seconds(1, num_sources, num_bytes)
    return seconds
