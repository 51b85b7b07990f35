"""Operators of a simulated cluster: they pause and resume it, reset its prefix caches, and drain its workers."""

from typing import TYPE_CHECKING

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.request import Party
from splitserve.router.requests.events import Event, PauseMode, PauseRequests, ResetCaches, ResumeRequests
from splitserve.router.requests.operations.drains import check_drain, worker_named
from splitserve.router.requests.operations.refusal import OperationRefusedError

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator

LONGEST_PAUSE_SECONDS = 3.0
TWICE_SHARE = 0.5
"""Share of pauses that an operator asks for twice, and ends twice."""
FORCED_SHARE = 0.5
"""Share of drains that an operator forces."""


class Operators:
    """The operators: each asks any router."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self._drained: list[Party] = []  # workers that were sent a drain

    def plan(self, within_seconds: float) -> None:
        """Plan all acts; they begin ``within_seconds``. Each pause is ended."""
        chosen, faults = self._sim.random, self._sim.faults
        for _ in range(faults.pauses):
            begin, seconds = chosen.uniform(0.0, within_seconds), chosen.uniform(0.1, LONGEST_PAUSE_SECONDS)
            pause, resume = PauseRequests(chosen.choice(list(PauseMode))), ResumeRequests()
            self._ask_at(begin, pause)
            if chosen.random() < TWICE_SHARE:
                self._ask_at(chosen.uniform(begin, begin + seconds), pause)
                self._ask_at(begin + seconds, resume)
            self._ask_at(begin + seconds, resume)
        for _ in range(faults.resets):
            self._ask_at(chosen.uniform(0.0, within_seconds), ResetCaches())
        for _ in range(faults.operator_drains):
            name, is_forced = chosen.choice(self._sim.names), chosen.random() < FORCED_SHARE
            when = chosen.uniform(0.0, within_seconds)
            self._sim.at(when, lambda n=name, f=is_forced: self._drain(n, force=f))  # type: ignore[misc]

    def _ask_at(self, time: float, event: Event) -> None:
        self._sim.at(time, lambda: self._sim.routers.ask(event))

    def _drain(self, name: str, *, force: bool) -> None:
        """Ask for the drain of a worker, as the HTTP layer does."""
        router = self._sim.routers.any_living()
        try:
            record = worker_named(router.membership, name)
            check_drain(router.membership, record, force=force, is_frozen=router.core.pause.freezes)
        except OperationRefusedError as refusal:
            self._sim.note(f"the drain of {name} is refused: {refusal}")
            return
        if record.state is WorkerState.DRAINING:
            return
        party, role = record.info.party, record.info.role
        ready = [each.info for each in router.membership.records() if each.state is WorkerState.READY]
        is_last = not any(info.role is role and info.party != party for info in ready)
        assert force or not is_last, f"{party} is to drain, the last {role} worker, although nobody forces it"
        if router.begin_drain(party):
            self._drained.append(party)

    def check_end(self) -> None:
        """Check that all workers have left that were to drain."""
        staying = [party for party in self._drained if self._sim.workers[str(party)].alive]
        assert not staying, f"{staying} were told to drain, and are still here"
