"""The parts of a worker's core, by their kinds."""

from splitserve.decode.part import SinkPart
from splitserve.engine.core import EngineCore
from splitserve.prefill.source import SourcePart


def source_of(core: EngineCore) -> SourcePart:
    """Return the part that offers blocks to peers."""
    [part] = [part for part in core.parts if isinstance(part, SourcePart)]
    return part


def sink_of(core: EngineCore) -> SinkPart:
    """Return the part that reads blocks from peers."""
    [part] = [part for part in core.parts if isinstance(part, SinkPart)]
    return part
