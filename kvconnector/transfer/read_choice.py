"""Choice of the path for a read's data, by the estimated cost of each path on this link. Pure."""

from dataclasses import dataclass

from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.protocol.handover.reads import ReadPath


@dataclass(frozen=True, slots=True)
class ReadShape:
    """Shape of reads from one peer."""

    is_whole: bool  # local blocks are whole blocks of the peer
    num_spans: int  # ranks of the peer that have heads of this rank
    num_layers: int
    local_block_bytes: int
    source_block_bytes: int
    slots_per_half: int  # staging slots, for blocks that are not whole
    blocks_per_gather: int  # blocks that the source gathers at once; 0 if it does not gather
    is_mapped: bool = False  # the local GPU can copy from the peer's memory


GATHER_MUST_SAVE = 0.2
"""Share of the time that a gather must save, because it also takes time of the source."""
TRANSPORT_MUST_SAVE = 0.2
"""Share of the time of copies through a mapping that a transport must save: a large read's rate is extrapolated from a
smaller one's with no better accuracy, and a transport has to be polled."""
KERNEL_MUST_SAVE = 0.1
"""Share of the copy engines' time that a kernel must save: it takes multiprocessors from concurrent steps."""


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
    """Estimate the seconds of reading ``num_blocks`` blocks, by each possible path.

    The blocks form ``num_runs`` runs that are adjacent on both sides; 0: each block is a run of its own.
    """
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
            cost.gather.seconds(1, num_bytes // num_gathers)  # further gathers run while preceding slots are read
            + cost.transport.seconds(2 * num_gathers, 2 * num_gathers, num_bytes)
            + cost.copy.seconds(num_gathers, num_bytes)
        )
    if shape.is_mapped and cost.mapped is not None:
        seconds[ReadPath.MAPPED] = cost.mapped.seconds(1, shape.num_spans * (num_runs or num_blocks), num_bytes)
    if shape.is_mapped and cost.kernel is not None:
        seconds[ReadPath.KERNEL] = cost.kernel.seconds(1, num_sources, num_bytes)
    return seconds
