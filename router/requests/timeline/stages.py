"""Stages of a request, from its timeline: adjacent intervals that add up to the whole by construction. Pure.

A stage ends where its event was marked. Where an event is unknown, the time up to the next known one is "unexplained".
An event's time is moved between its neighbours', so no stage is negative, however wrong a clock is.
"""

from collections.abc import Iterable

from splitserve.protocol.messages.marks import MarkKind
from splitserve.router.requests.timeline.timeline import AttemptTimeline, Timeline, Times

UNEXPLAINED = "unexplained"

TTFT_STAGES = {
    "receive": "A new connection was accepted with the request waiting on it until the request's head was read",
    "prepare": "Head of the HTTP request read until its prompt is tokens: body, chat template, tokenizer",
    "queue": "Wait in the router until a worker can take the request",
    "retries": "Attempts that failed before the one with the first token",
    "dispatch": "Way of the request to the worker that computes the prompt, and its wait in that worker's inbox",
    "grant_wait": "Wait of prefill for the grant: decode reserves room for the whole prompt, once its turn comes soon",
    "prefix_read": "Read of a prefix that another worker had, and the wait for room for the prompt",
    "prefill_queue": "Wait for the prompt's first step, the grant_wait left out",
    "prefill": "First step of the prompt until its first token is drawn: all chunks, and the steps between them",
    "handover": "Hand-over of the prompt's KV, for the choices after the first",
    "choice": "Computation of the first token of a choice after the first",
    "delivery": "Way of the first token to the router",
    "write": "First token in the router until its event is written to the client's connection; only of streams",
    UNEXPLAINED: "Time between events of which one is unknown",
}
"""Stages of the time to first token, in their order, with their meanings."""

HANDOVER_STAGES = {
    "offer": "Prefill's last token drawn until the last offer has arrived at decode",
    "post": "Arrival of the last offer until the last read is posted",
    "wire": "Last read posted until its bytes have arrived",
    "verify": "Bytes arrived until all blocks are verified",
    "decode_queue": "Blocks verified until the first decode step is launched",
    "first_step": "Launch of the first decode step until its token is drawn",
    UNEXPLAINED: "Time between events of which one is unknown",
}
"""Stages from the last token that prefill drew to decode's own first one, in their order, with their meanings."""

Boundary = tuple[str, float | None]


def ttft_stages(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each stage; their sum is the time to first token. {}: no token came."""
    attempt = timeline.first_token_attempt
    return {} if attempt is None else _ttft_stages(timeline, attempt, attempt.by_kind())


def all_stages(timeline: Timeline, *, has_handover: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the stages of the time to first token, and those of the hand-over of the last attempt if it had one: what
    :func:`ttft_stages` and :func:`handover_stages` return, in one pass over the marks."""
    first, last = timeline.first_token_attempt, timeline.attempts[-1]
    times = last.by_kind()
    of_handover = _handover_stages(times) if has_handover else {}
    if first is None:
        return {}, of_handover
    return _ttft_stages(timeline, first, times if first is last else first.by_kind()), of_handover


def _ttft_stages(timeline: Timeline, attempt: AttemptTimeline, times: tuple[Times, Times]) -> dict[str, float]:
    """Return the stages; ``attempt`` delivered the first token, and had its marks at these times."""
    if not timeline.num_tokens:
        return {}
    first = timeline.attempts[0]
    boundaries: list[Boundary] = [("prepare", timeline.prepared_at or None), ("queue", first.began_at)]
    if timeline.read_at > timeline.arrived_at:
        boundaries.insert(0, ("receive", timeline.read_at))
    if attempt is not first:
        boundaries.append(("retries", attempt.began_at))
    boundaries += _worker_boundaries(attempt, times)
    boundaries.append(("delivery", timeline.first_token_at))
    if timeline.first_written_at:
        boundaries.append(("write", timeline.first_written_at))
    return _split(timeline.arrived_at, timeline.first_written_at or timeline.first_token_at, boundaries)


def _worker_boundaries(attempt: AttemptTimeline, times: tuple[Times, Times]) -> list[Boundary]:
    """Return the ends of the stages in the worker that computes the prompt."""
    at, at_decode = times if attempt.primary is None else attempt.primary.by_kind()
    boundaries: list[Boundary] = [("dispatch", at.get(MarkKind.ACCEPTED))]
    if attempt.is_disaggregated:
        if MarkKind.ASKED in at:  # a late grant: others came first
            boundaries.append(("prefill_queue", at[MarkKind.ASKED]))
        boundaries.append(("grant_wait", at.get(MarkKind.GRANTED)))
    if MarkKind.PREFIX in at:
        boundaries.append(("prefix_read", at[MarkKind.PREFIX]))
    boundaries += [("prefill_queue", at.get(MarkKind.BEGUN)), ("prefill", at.get(MarkKind.DRAWN))]
    if attempt.primary is not None:
        if attempt.is_disaggregated:
            boundaries.append(("handover", at_decode.get(MarkKind.VERIFIED)))
        own_at, own_at_decode = times
        boundaries.append(("choice", own_at.get(MarkKind.DRAWN) or own_at_decode.get(MarkKind.DRAWN)))
    return boundaries


def handover_stages(attempt: AttemptTimeline) -> dict[str, float]:
    """Return the seconds of each stage from prefill's last token to decode's first one; {} if either is unknown."""
    return _handover_stages(attempt.by_kind())


def _handover_stages(times: tuple[Times, Times]) -> dict[str, float]:
    at, at_decode = times
    begin, end = at.get(MarkKind.SECOND, at.get(MarkKind.DRAWN)), at_decode.get(MarkKind.DRAWN)
    if begin is None or end is None or MarkKind.VERIFIED not in at_decode:
        return {}
    boundaries: list[Boundary] = [("offer", at_decode.get(MarkKind.OFFERED))]
    boundaries += [
        (stage, at_decode[kind])
        for stage, kind in (("post", MarkKind.POSTED), ("wire", MarkKind.READ))
        if kind in at_decode  # nothing is read if decode had the whole prompt
    ]
    boundaries += [
        ("verify", at_decode[MarkKind.VERIFIED]),
        ("decode_queue", at_decode.get(MarkKind.BEGUN)),
        ("first_step", end),
    ]
    return _split(begin, max(begin, end), boundaries)


def read_times(attempt: AttemptTimeline) -> tuple[float, float]:
    """Return the seconds from the first read posted, and from the last offer's arrival, until all was verified."""
    _, at = attempt.by_kind()
    verified_at = at.get(MarkKind.VERIFIED)
    if verified_at is None:
        return 0.0, 0.0
    since = (at.get(MarkKind.READING, verified_at), at.get(MarkKind.OFFERED, verified_at))
    return max(0.0, verified_at - since[0]), max(0.0, verified_at - since[1])


def _split(begin: float, end: float, boundaries: Iterable[Boundary]) -> dict[str, float]:
    """Return the seconds between adjacent boundaries from ``begin`` to ``end``, by the stages that end there."""
    stages: dict[str, float] = {}
    unexplained, cursor, is_known = 0.0, begin, True
    for name, at in boundaries:
        if at is None:
            is_known = False
            continue
        stop = cursor if at < cursor else end if at > end else at
        if is_known:
            stages[name] = stages.get(name, 0.0) + stop - cursor
        else:
            unexplained += stop - cursor
        cursor, is_known = stop, True
    stages[UNEXPLAINED] = unexplained + end - cursor
    return stages
