"""How a request ended, in the words of metrics and of ``return_route``. Pure."""

from typing import Any

import msgspec

from splitserve.router.links.membership import decode_party, prefill_party
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.state import Phase, RequestState


def outcome(state: RequestState) -> tuple[str, str, str]:
    """``(intended, actual, reason)`` of a request that has ended.

    ``actual`` is disaggregated only if the final attempt's decode used a block that it had read from prefill; else the
    reason says why none was needed, so that a fallback can't go unseen.
    """
    intended = "disaggregated" if state.was_disaggregated else "local"
    if state.failure is not None:
        return intended, "failed", state.failure.reason.value
    if state.phase is Phase.CANCELLED:
        return intended, "failed", "cancelled"
    if intended == "local":
        return intended, "local", "ok"
    if not isinstance(state.placement, Disaggregated):
        return intended, "local", f"after_{state.history[-1].failure.reason}" if state.history else "no_prefill_worker"
    if state.handover is None:
        return intended, "local", "ended_with_first_token" if state.num_attempt_tokens <= 1 else "no_handover_report"
    if state.handover.blocks == 0:
        return intended, "local", "cached_on_decode"
    return intended, "disaggregated", "ok"


def route(state: RequestState) -> dict[str, Any]:
    """The ``splitserve`` object of an answer: where the request ran, what its hand-over cost, what failed before."""
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
        "handover_seconds": state.handover_seconds,
        "handover": None if state.handover is None else msgspec.to_builtins(state.handover),
    }
