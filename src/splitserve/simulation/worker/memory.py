"""The blocks of a simulated step: those that it touches, and the copies that it makes between them."""

from collections.abc import Sequence

from splitserve.protocol.step import StepPlan
from splitserve.simulation.model import BLOCK_SIZE


def touched_blocks(plan: StepPlan, group: int) -> list[int]:
    """Return the blocks of a group that a step reads or writes; some may be there twice."""
    in_tables = [block_id for chunk in plan.chunks for block_id in chunk.table(group).block_ids]
    return in_tables + [copy.source for chunk in plan.chunks for copy in chunk.copies if copy.group == group]


def copy_blocks(plan: StepPlan, memories: Sequence[Sequence[list[int]]], heads: range) -> None:
    """Make the copies of a step, of a rank's ``heads``. ``memories``: by group and block the KV, head by head."""
    span = slice(heads.start * BLOCK_SIZE, heads.stop * BLOCK_SIZE)
    for copy in (copy for chunk in plan.chunks for copy in chunk.copies):
        memories[copy.group][copy.target][span] = memories[copy.group][copy.source][span]
