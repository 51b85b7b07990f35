"""Rank 0's runner when there are others: a step goes to all of them, and then runs here."""

from dataclasses import dataclass

from splitserve.models.runner.runner import ModelRunner, NonFiniteLogitsError
from splitserve.protocol.step import LaunchedStep, LaunchingRunner, StepOutput, StepPlan
from splitserve.worker.ranks.others import Ranks


class RankedRunner:
    """The runner of all ranks, for the :class:`~splitserve.engine.steps.executor.StepExecutor`.

    All ranks draw the same tokens; logits that aren't finite are so everywhere, and no rank is out of step after them.
    Any other error of one rank ends the worker.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def run(self, plan: StepPlan) -> StepOutput:
        try:
            self._ranks.send(plan)
            return self._runner.run(plan)
        except NonFiniteLogitsError:
            raise
        except Exception as error:
            raise self._ranks.explain(error) from error


class RankedLauncher:
    """The launching runner of all ranks, for the :class:`~splitserve.engine.steps.overlapped.OverlappedExecutor`. See
    :class:`RankedRunner`.

    The other ranks receive a step when it is launched here, and ranks wait for each other on the devices alone.
    """

    def __init__(self, runner: LaunchingRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> LaunchedStep:
        try:
            self._ranks.send(plan)
            return _RankedStep(self._runner.launch(plan), self._ranks)
        except Exception as error:
            raise self._ranks.explain(error) from error


@dataclass(frozen=True, slots=True)
class _RankedStep:
    pending: LaunchedStep
    ranks: Ranks

    @property
    def queued_at(self) -> float:
        return self.pending.queued_at

    def wait(self) -> StepOutput:
        try:
            return self.pending.wait()
        except NonFiniteLogitsError:
            raise
        except Exception as error:
            raise self.ranks.explain(error) from error
