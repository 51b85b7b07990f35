"""Which path the data of a read takes, by what each would cost on this link. Pure."""

from dataclasses import dataclass

from splitserve.handover import ReadPath
from splitserve.kvconnector.read_cost import ReadCost


@dataclass(frozen=True, slots=True)
class ReadShape:
    """What reads from one peer look like. ``num_spans`` of its ranks have heads of ours; its blocks go through
    ``slots_per_half`` slots where they aren't whole blocks of ours."""

    is_whole: bool
    num_spans: int
    num_layers: int
    local_block_bytes: int
    source_block_bytes: int
    slots_per_half: int


def choose_path(shape: ReadShape, cost: ReadCost, num_blocks: int) -> ReadPath:
    if shape.is_whole:
        return ReadPath.DIRECT
    seconds = path_seconds(shape, cost, num_blocks)
    return min(seconds, key=lambda path: seconds[path])


def path_seconds(shape: ReadShape, cost: ReadCost, num_blocks: int) -> dict[ReadPath, float]:
    """What reading ``num_blocks`` blocks whose heads are split otherwise would take, by path."""
    num_bytes = num_blocks * shape.local_block_bytes
    num_reads = shape.num_spans * -(-num_blocks // shape.slots_per_half)
    num_sources = shape.num_spans * num_blocks
    return {
        ReadPath.LAYERS: cost.read_seconds(shape.num_spans, num_sources * shape.num_layers, num_bytes),
        ReadPath.STAGED: cost.read_seconds(num_reads, num_sources, num_sources * shape.source_block_bytes)
        + cost.copy_seconds(num_reads, num_bytes),
    }
