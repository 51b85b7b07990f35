"""Scripts of workers that compute nothing: the tokens of their answers, and their times."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import (
    DecodeRequest,
    HandoverReport,
    LocalRequest,
    PrefillRequest,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import FinishReason

DEFAULT_LAYOUT = LayoutRecord(
    model="instant",
    weights_version="0",
    dtype="float32",
    block_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Message to send to the router ``delay_seconds`` after the request arrived; bytes are sent unchanged."""

    body: Body | bytes
    delay_seconds: float = 0.0


Request: TypeAlias = PrefillRequest | DecodeRequest | LocalRequest
Script = Callable[[Request], Sequence[Reply]]
Output = Callable[[Sequence[int]], Iterator[int]]


def repeat_prompt(token_ids: Sequence[int]) -> Iterator[int]:
    return itertools.cycle(token_ids)


def default_script(
    output: Output = repeat_prompt,
    *,
    tokens_per_message: int = 0,
    token_seconds: float = 0.0,
    first_token_seconds: float = 0.0,
) -> Script:
    """Return the script of a correct worker: prefill sends the first token, decode all of them with a report, mixed all
    of them.

    ``tokens_per_message`` 0 packs all into one message; ``token_seconds`` paces them, after
    ``first_token_seconds``.
    """

    def script(body: Request) -> list[Reply]:
        if isinstance(body, PrefillRequest):
            token_ids, reason = _outputs(body, output)
            first_reason = reason if len(token_ids) == 1 else None
            return [Reply(StepTokens([TokenDelta(body.key, 0, token_ids[:1], finish_reason=first_reason)]))]
        token_ids, reason = _outputs(body, output)
        report = _report(body) if isinstance(body, DecodeRequest) else None
        size = tokens_per_message or len(token_ids)
        # The first token may end the request: then there is no decode but for the other choices.
        is_over = isinstance(body, DecodeRequest) and len(token_ids) == 1
        replies = []
        for key in (*(() if is_over else (body.key,)), *body.siblings):
            for begin in range(0, len(token_ids), size):
                last = begin + size >= len(token_ids)
                delta = TokenDelta(
                    key,
                    begin,
                    token_ids[begin : begin + size],
                    finish_reason=reason if last else None,
                    handover=report if begin == 0 else None,
                )
                replies.append(Reply(StepTokens([delta]), first_token_seconds + begin * token_seconds))
        return replies

    return script


def _outputs(body: Request, output: Output) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    for token_id in output(body.token_ids):
        token_ids.append(token_id)
        reason = body.sampling.finish_reason(token_id, len(token_ids))
        if reason is not None:
            return token_ids, reason
    return token_ids, None


def _report(body: DecodeRequest) -> HandoverReport:
    num_blocks = -(-len(body.token_ids) // DEFAULT_LAYOUT.block_size)
    return HandoverReport(
        prefill=body.prefill.party.engine_id,
        transport="none",
        blocks=num_blocks,
        bytes=num_blocks * 4096,
        cached_tokens=0,
        reads=1,
    )
