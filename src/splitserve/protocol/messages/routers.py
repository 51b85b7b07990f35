"""Messages between router processes that share one port: their loads, the prefixes that they sent, questions.

A report has absolute values: one that is lost is made up for by the next one.
"""

from typing import Annotated, Literal

import msgspec

from splitserve.protocol.messages.base import Message
from splitserve.protocol.messages.membership import MAX_LINKS
from splitserve.protocol.request import Party
from splitserve.protocol.wire_numbers import BlockHash, Count, NonNegative

MAX_HASHES = 4096
"""Blocks of one message about prefixes that were sent."""
MAX_TENANTS_REPORTED = 4096
MAX_QUESTION_CHARS = 256

Topic = Literal["metrics", "rates", "traces", "tenants"]


class WorkerUse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The requests that a router has in flight at one worker: see :class:`splitserve.router.placement.policies.\
WorkerView`."""

    worker: Party
    num_requests: Count = 0
    prefill_tokens: Count = 0
    context_tokens: Count = 0
    decoding_tokens: Count = 0
    num_prefilling: Count = 0
    queue_seconds: NonNegative = 0.0
    busy_share: NonNegative = 0.0


class TenantUse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tenant's requests in flight at one router, the tokens that it has used there since the router's start, and
    those of all routers that its limit has not given back."""

    name: str
    num_in_flight: Count = 0
    num_tokens: Count = 0
    level: NonNegative = 0.0


class PauseStamp(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """The last pause or resumption that a router knows; the greatest one holds. ``router``: that which an operator
    asked; ``mode``: "" for a resumption."""

    number: Count = 0  # microseconds of the machine's monotonic clock, or one more than the greatest one heard
    router: str = ""
    mode: Literal["", "abort", "wait", "keep"] = ""


class RouterReport(Message, frozen=True):
    """The state of a router, every 100 ms and at once when much of it has changed. ``number``: its reports so far.

    ``reset``: the number of the last reset of prefix caches that it knows, made like a pause's; ``reset_done``: of the
    last one that all workers have confirmed to it."""

    number: Count
    num_ready: Count = 0  # workers that it can place requests on
    num_admitted: Count = 0
    num_running: Count = 0
    num_waiting: Count = 0
    workers: Annotated[list[WorkerUse], msgspec.Meta(max_length=MAX_LINKS)] = []
    tenants: Annotated[list[TenantUse], msgspec.Meta(max_length=MAX_TENANTS_REPORTED)] = []
    pause: PauseStamp = PauseStamp()
    reset: Count = 0
    reset_done: Count = 0


class SentPrefixes(Message, frozen=True):
    """Blocks of prompts that a router has sent to a worker since the reset with this number, ends of prompts first."""

    worker: Party
    hashes: Annotated[list[BlockHash], msgspec.Meta(max_length=MAX_HASHES)]
    reset: Count = 0


class AskRouter(Message, frozen=True):
    """A question for another router. ``tenants``: read the file of tenants again; there is no answer."""

    question_id: Count
    topic: Topic
    argument: Annotated[str, msgspec.Meta(max_length=MAX_QUESTION_CHARS)] = ""


class RouterAnswer(Message, frozen=True):
    question_id: Count
    content: bytes
