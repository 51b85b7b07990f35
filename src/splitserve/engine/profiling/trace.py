"""Reads how busy a device was from a trace of torch.profiler, in Chrome's format. Pure, but for the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_KINDS = frozenset({"cpu_op"})
LONG_GAP_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Busy:
    """The activity of the device in a trace."""

    seconds: float = 0.0  # from the begin of the first span to the end of the last one
    busy_seconds: float = 0.0  # in which a kernel or a copy ran; overlapping ones count once
    long_gap_seconds: float = 0.0  # in idle gaps of over 20 us, more than lies between two kernels of a CUDA graph
    num_spans: int = 0  # kernels and copies

    @property
    def share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        gaps = f"{100 * self.long_gap_seconds / max(self.seconds, 1e-9):.2f}% in gaps of over 20 us"
        return f"device busy {100 * self.share:.2f}% of {self.seconds:.3f} s, {gaps}"


NOT_BUSY = Busy()


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # the format's names
    baseTimeNanoseconds: int = 0


def read_busy(path: Path, since_ns: int = 0) -> Busy:
    """Read the activity from the trace at ``path``: the GPU's if the trace has any of its spans, else that of the
    host's operators.

    Spans that began before ``since_ns`` (of ``time.time_ns``) are left out.
    """
    # Kineto writes names of files and kernels as they are; stray bytes in them are of no interest here.
    data = path.read_bytes().decode("utf-8", errors="replace")
    trace = msgspec.json.decode(data, type=_Trace, strict=False)
    since_us = (since_ns - trace.baseTimeNanoseconds) * 1e-3 if trace.baseTimeNanoseconds else 0.0
    complete = [event for event in trace.traceEvents if event.ph == "X"]
    spans = [event for event in complete if event.cat in DEVICE_KINDS]
    spans = spans or [event for event in complete if event.cat in HOST_KINDS]
    spans = [event for event in spans if event.ts >= since_us]
    return busy_of([event.ts * 1e-6 for event in spans], [event.dur * 1e-6 for event in spans])


def busy_of(begins: Sequence[float], durations: Sequence[float]) -> Busy:
    """The union of spans, in seconds, in any order."""
    if not begins:
        return NOT_BUSY
    order = np.argsort(begins, kind="stable")
    begin = np.asarray(begins)[order]
    end = np.maximum.accumulate(begin + np.asarray(durations)[order])
    gaps = np.maximum(begin[1:] - end[:-1], 0.0)
    seconds = float(end[-1] - begin[0])
    return Busy(
        seconds=seconds,
        busy_seconds=seconds - float(gaps.sum()),
        long_gap_seconds=float(gaps[gaps > LONG_GAP_SECONDS].sum()),
        num_spans=len(begin),
    )
