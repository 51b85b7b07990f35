"""The parts of a worker's core, by their kinds. Not a test module."""

from splitserve.decode.part import SinkPart
from splitserve.prefill.core import EngineCore
from splitserve.prefill.source import SourcePart


def source_of(core: EngineCore) -> SourcePart:
    [part] = [part for part in core.parts if isinstance(part, SourcePart)]
    return part


def sink_of(core: EngineCore) -> SinkPart:
    [part] = [part for part in core.parts if isinstance(part, SinkPart)]
    return part
