"""Spans of a GPU's work, and its time by kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Span = tuple[float, float, str]
"""Start and end in microseconds, and the name of a kernel or copy."""


def device_spans(run: Callable[[], object]) -> list[Span]:
    """Return the GPU's spans in ``run``, by start; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        run()
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    )


def busy_share(spans: Sequence[Span]) -> float:
    """Compute the share of the time from the first start to the last end in which something ran; 0 without spans."""
    if not spans:
        return 0.0
    busy, reached = 0.0, spans[0][0]
    for start, end, _ in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])


def by_kernel(spans: Sequence[Span], count: int) -> list[dict[str, Any]]:
    """Return microseconds and calls of each kernel per step, the longest first; ``spans`` cover ``count`` steps.

    ``us`` of a kernel that starts early includes its wait for the previous one. ``after_us`` counts from the end of the
    previous one, or from the kernel's own start if that is later: these add up to the GPU's busy time.
    """
    totals: dict[str, list[float]] = {}
    alone: dict[str, float] = {}
    reached = 0.0
    for start, end, name in sorted(spans, key=lambda span: span[1]):
        totals.setdefault(name[:120], []).append(end - start)
        alone[name[:120]] = alone.get(name[:120], 0.0) + end - max(start, reached)
        reached = end
    rows = [
        {
            "kernel": name,
            "us": round(sum(times) / count, 1),
            "after_us": round(alone[name] / count, 1),
            "calls": len(times) / count,
        }
        for name, times in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["after_us"])))
