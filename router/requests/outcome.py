"""Outcome of a request, in the terms of metrics and of ``return_route``. Pure."""

from typing import Any

import msgspec

from splitserve.protocol.messages.requests import HandoverReport
from splitserve.router.links.membership import decode_party, prefill_party
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.state import RequestPhase, RequestState
from splitserve.router.requests.timeline.stages import handover_stages, read_times, ttft_stages
from splitserve.router.requests.timeline.timeline import AttemptTimeline, Timeline


def outcome(state: RequestState) -> tuple[str, str, str]:
    """Return ``(intended, actual, reason)`` of a request that has ended.

    ``actual`` is disaggregated only if the final attempt's decode used a block that it had read from prefill. Else the
    reason states why it used none, so that every fallback is visible.
    """
    intended = "disaggregated" if state.was_disaggregated else "local"
    if state.failure is not None:
        return intended, "failed", state.failure.reason.value
    if state.phase is RequestPhase.CANCELLED:
        return intended, "cancelled", "cancelled"
    if intended == "local":
        return intended, "local", "ok"
    if not isinstance(state.placement, Disaggregated):
        return intended, "local", f"after_{state.history[-1].failure.reason}" if state.history else "no_prefill_worker"
    if state.handover is None:
        return intended, "local", _why_without_handover(state)
    if state.handover.blocks == 0:
        return intended, "local", "cached_on_decode"
    return intended, "disaggregated", "ok"


def _why_without_handover(state: RequestState) -> str:
    """Return the reason for which decode has reported no hand-over."""
    if state.num_attempt_tokens <= 1:
        return "ended_with_first_token"
    return "ended_with_second_token" if state.ended_at_prefill else "no_handover_report"


def route(state: RequestState, timeline: Timeline) -> dict[str, Any]:
    """Return the ``splitserve`` object of an answer: the request's workers, its stages so far, its hand-over's cost,
    earlier failures."""
    placement = state.placement
    if placement is None:  # between attempts
        placement = state.history[-1].placement
    return {
        "mode": "disaggregated" if isinstance(placement, Disaggregated) else "local",
        "prefill": prefill_party(placement).engine_id,
        "decode": decode_party(placement).engine_id,
        "attempts": state.num_attempts,
        "failed_attempts": [
            {"worker": attempt.culprit.engine_id, "reason": attempt.failure.reason.value} for attempt in state.history
        ],
        "cached_tokens": state.num_cached_tokens,
        "stages": ttft_stages(timeline),
        "handover_seconds": timeline.attempts[-1].handover_seconds,
        "handover": None if state.handover is None else _handover(state.handover, timeline.attempts[-1]),
    }


def _handover(report: HandoverReport, attempt: AttemptTimeline) -> dict[str, Any]:
    """Return decode's report with its times: since the first read posted, and since the last offer's arrival."""
    seconds, exposed_seconds = read_times(attempt)
    times = {"seconds": seconds, "exposed_seconds": exposed_seconds, "stages": handover_stages(attempt)}
    return {**msgspec.to_builtins(report), **times}
