"""Policies that predict nothing: turns, the power of two choices, conversations, prefixes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from splitserve.protocol.request import Role
from splitserve.router.placement.policies import (
    NoWorker,
    Placement,
    RequestShape,
    Snapshot,
    WorkerView,
    decode_load,
    fitting_workers,
    least_loaded,
    of_role,
    prefill_load,
    session_rank,
)

Rank: TypeAlias = Callable[[WorkerView], object]


def round_robin(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the workers that were given the fewest so far."""
    return _first_by(lambda worker: (worker.num_placed, worker.party.engine_id), snapshot, shape)


def power_of_two(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the less loaded of two workers per role, drawn anew for each request (Mitzenmacher, 2001)."""
    chosen = random.Random(sum(worker.num_placed for worker in snapshot.workers))
    drawn: list[WorkerView] = []
    workers = fitting_workers(snapshot, shape)
    for role in Role:
        fitting = of_role(workers, role)
        drawn += chosen.sample(fitting, min(2, len(fitting)))
    return _placed(drawn, snapshot, shape)


def session(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a conversation always on the same workers, by rendezvous hashing; one without a name, by load."""
    if not shape.session:
        return least_loaded(snapshot, shape)

    return _first_by(lambda worker: session_rank(shape.session, worker), snapshot, shape)


def prefix(snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request where the longest part of its prompt is cached, by load where that is less than half of it, or
    less than the worker has more to compute than another one: so a first part that all prompts share gathers nobody."""
    shortest = {
        role: min((worker.prefill_tokens for worker in snapshot.workers if worker.role is role), default=0)
        for role in Role
    }

    def rank(worker: WorkerView) -> tuple[int, object]:
        load = prefill_load(worker) if worker.role is Role.PREFILL else decode_load(worker)
        matched = worker.prefix_match_tokens
        is_worth_it = matched * 2 >= shape.num_prompt_tokens
        return (-matched if is_worth_it and matched >= worker.prefill_tokens - shortest[worker.role] else 0, load)

    return _first_by(rank, snapshot, shape)


def _first_by(rank: Rank, snapshot: Snapshot, shape: RequestShape) -> Placement:
    """Place a request on the worker of each role with the lowest rank."""
    first: list[WorkerView] = []
    workers = fitting_workers(snapshot, shape)
    for role in Role:
        first += sorted(of_role(workers, role), key=rank)[:1]  # type: ignore[arg-type]  # ranks of one policy compare
    return _placed(first, snapshot, shape)


def _placed(drawn: list[WorkerView], snapshot: Snapshot, shape: RequestShape) -> Placement:
    placement = least_loaded(replace(snapshot, workers=tuple(drawn)), shape)
    return least_loaded(snapshot, shape) if isinstance(placement, NoWorker) else placement
