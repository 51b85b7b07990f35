"""The serving mode of a cluster with prefill and decode workers: disaggregated, or aggregated, where each worker does
both phases of its requests. Pure."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from splitserve.protocol.request import Role
from splitserve.router.placement.modes.arrangements import Arrangements, Pool, Sizes
from splitserve.router.placement.modes.recent_sizes import RecentSizes
from splitserve.router.placement.policies import WorkerView, of_role
from splitserve.router.placement.step_models import TRUSTED_STEPS
from splitserve.router.requests.objectives import Objectives

GAIN, LOSS = 1.0, 0.95
"""Rate that aggregated workers hold, over that of disaggregated ones, from which on, and below which no longer, serving
is aggregated."""
HIGH_LOAD, LOW_LOAD = 0.8, 0.6
"""Recent rate over that which disaggregated workers hold, from which on, and down to which, serving is aggregated.
Below, disaggregated workers hold the objectives as well, with shorter gaps."""
REVIEW_SECONDS = 0.33
NUM_REVIEWS = 3
"""Reviews in a row that must agree before serving becomes aggregated: what requests draw on prefill workers until it
goes back keeps these slow for seconds."""
MIN_PROMPTS = 20
"""Requests whose sizes are known, at least."""

log = logging.getLogger(__name__)


class Held(NamedTuple):
    """Requests per second that the cluster holds within the objectives, as predicted; 0.0: none."""

    disaggregated: float
    aggregated: float


class ServingMode:
    """Decides on the mode from time to time, by what both hold at the sizes of recent requests. ``held``: as of the
    last review; None: not known."""

    def __init__(self, objectives: Objectives) -> None:
        self.is_aggregated = False
        self.held: Held | None = None
        self._objectives = objectives
        self._has_objectives = min(objectives.ttft_seconds, objectives.tpot_seconds) > 0.0
        self._review_at = 0.0
        self._num_agreeing = 0  # reviews in a row by which serving should be aggregated

    def is_due(self, now: float) -> bool:
        """Return whether :meth:`review` has something to do."""
        return self._has_objectives and now >= self._review_at

    def review(
        self, workers: Sequence[WorkerView], are_alike: bool, sizes: RecentSizes, now: float, *, routers: float = 1.0
    ) -> None:
        """Decide anew. ``are_alike``: the workers have the same model and device; others can't be compared.
        ``routers``: requests of all routers in flight over this one's."""
        self._review_at = now + REVIEW_SECONDS
        prefill, decode = of_role(workers, Role.PREFILL), of_role(workers, Role.DECODE)
        comparable = are_alike and prefill and decode and len(prefill) + len(decode) == len(workers)
        if not comparable or sizes.num_prompts < MIN_PROMPTS or not (_is_known(prefill) and _is_known(decode)):
            self.held = None
            self._set(False, "their steps are not known, or can't be compared")
            return
        found = Arrangements(Pool.of(prefill), Pool.of(decode), Sizes.of(sizes), self._objectives)
        self.held = Held(found.disaggregated(), found.aggregated())
        (split, whole), rate = self.held, routers * sizes.rate(now)
        gain, load = (LOSS, LOW_LOAD) if self.is_aggregated else (GAIN, HIGH_LOAD)
        pays = whole > 0.0 and whole >= gain * split and rate >= load * split
        self._set(pays, f"{rate:.3g} requests/s come; aggregated {whole:.3g} can be held, disaggregated {split:.3g}")

    def _set(self, pays: bool, why: str) -> None:
        self._num_agreeing = self._num_agreeing + 1 if pays else 0
        is_aggregated = pays and (self.is_aggregated or self._num_agreeing >= NUM_REVIEWS)
        if is_aggregated != self.is_aggregated:
            self.is_aggregated = is_aggregated
            if is_aggregated:
                log.info("each worker does both phases from now on: %s", why)
            else:
                log.info("prefill and decode workers keep their roles from now on: %s", why)


def _is_known(workers: Sequence[WorkerView]) -> bool:
    return any(worker.step_model.num_steps >= TRUSTED_STEPS for worker in workers)
