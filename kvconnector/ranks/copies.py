"""Copies of the tiers of a tensor-parallel worker: each rank stores its own heads of each block; rank 0 decides, and a
copy is complete when it is complete on all ranks. A block that is missing on one rank counts as missing on all."""

from collections.abc import Sequence

from splitserve.kvconnector.ranks.transfers import RankedConnector
from splitserve.kvconnector.tiers.commands import AnyCommand, AnyResult, CopyCommand, CopyNearsEnd, CopyResult
from splitserve.kvconnector.tiers.copies import LocalTierCopier
from splitserve.kvconnector.tiers.shared import ChainCopy, TierState


class CopyJoin:
    """Joins the ranks' results of one copy."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._results: list[CopyResult] = []

    def add(self, result: CopyResult) -> CopyResult | None:
        """Add a rank's result; return the copy's result once all have reported: as many good blocks as on the rank with
        the fewest."""
        self._results.append(result)
        if len(self._results) < self._num_ranks:
            return None
        error = next((each.error for each in self._results if each.error is not None), None)
        seconds = max(each.seconds for each in self._results)
        was_dropped = any(each.was_dropped for each in self._results)
        is_full = any(each.is_full for each in self._results)
        num_good = min(each.num_good for each in self._results)
        return CopyResult(result.copy_id, num_good, error, seconds, was_dropped, is_full)


class StateJoin:
    """Joins the ranks' states of the shared tier."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._states: dict[int, TierState] = {}

    def add(self, rank: int, state: TierState) -> TierState:
        """Return the state common to all ranks: available if it is available to every rank, with the same chunk
        size."""
        self._states[rank] = state
        is_same = len(self._states) == self._num_ranks and len(set(self._states.values())) == 1
        return state if is_same else TierState(state.tier, is_available=False)


class RankedTierCopier:
    """Rank 0's :class:`splitserve.kvconnector.tiers.copies.TierCopier`; ``local`` performs its own part."""

    def __init__(self, local: LocalTierCopier, connector: RankedConnector) -> None:
        self._local = local
        self._connector = connector
        self._num_ranks = 1 + connector.num_other_ranks
        self._joins: dict[int, CopyJoin] = {}
        self._state = StateJoin(self._num_ranks)

    def start(self, command: AnyCommand) -> None:
        if isinstance(command, CopyCommand | ChainCopy):
            self._joins[command.copy_id] = CopyJoin(self._num_ranks)
        self._connector.copy(command)
        self._local.start(command)

    def results(self) -> Sequence[AnyResult]:
        whole: list[AnyResult] = []
        for rank, result in (*((0, result) for result in self._local.results()), *self._connector.copy_results()):
            if isinstance(result, CopyNearsEnd):
                continue  # a step would have to wait on all ranks' devices
            joined = self._state.add(rank, result) if isinstance(result, TierState) else self._join(result)
            if joined is not None:
                whole.append(joined)
        return whole

    def close(self, timeout_seconds: float) -> None:
        self._local.close(timeout_seconds)

    def _join(self, result: CopyResult) -> CopyResult | None:
        joined = self._joins[result.copy_id].add(result)
        if joined is not None:
            del self._joins[result.copy_id]
        return joined
