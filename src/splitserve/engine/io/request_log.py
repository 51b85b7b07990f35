"""A worker's lines about requests, with the ids that the router and the client know them by."""

import logging

from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.requests import FailureCode, RequestFailed, StepTokens, TokenDelta

log = logging.getLogger(__name__)

FAULTS = (FailureCode.INTERNAL, FailureCode.HANDOVER)
"""Failures that have a cause in the cluster, which an operator may want to find."""


class RequestLog:
    """Writes one line per request when this worker's work for it is done. ``writes_lines``: off, those of failures
    only."""

    def __init__(self, *, writes_lines: bool) -> None:
        self._writes_lines = writes_lines and log.isEnabledFor(logging.INFO)

    def note_sent(self, body: Body) -> None:
        """Take a message to the router."""
        if isinstance(body, StepTokens):
            for delta in body.deltas if self._writes_lines else ():
                if delta.finish_reason is not None:
                    num_tokens = delta.position + len(delta.token_ids)
                    log.info("request %s finished (%s), output=%d", delta.key, delta.finish_reason, num_tokens)
                elif delta.marks:
                    self._note_first_token(delta)
        elif isinstance(body, RequestFailed):
            level = logging.WARNING if body.code in FAULTS else logging.INFO
            log.log(level, "request %s failed here (%s): %s", body.key, body.code, body.message)

    @staticmethod
    def _note_first_token(delta: TokenDelta) -> None:
        """Log the end of the prompt, if another worker decodes."""
        at = {mark.kind: mark.at for mark in delta.marks}
        if MarkKind.VERIFIED in at or not {MarkKind.ACCEPTED, MarkKind.GRANTED, MarkKind.DRAWN} <= at.keys():
            return
        log.info(
            "request %s prefilled, cached=%d, ms=%.1f",
            delta.key,
            delta.num_cached_tokens,
            1e3 * (at[MarkKind.DRAWN] - at[MarkKind.ACCEPTED]),
        )
