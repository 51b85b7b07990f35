"""Failures of steps: which step failed by itself, and which ones only followed it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.protocol.step import MAX_STEPS_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Step number ``step`` ended with ``error``. ``cause``, if any, is the failure of an earlier step that led to it.

    ``device_lost``: no step can run in this process any more.
    """

    step: int
    error: Exception
    cause: "StepFailure | None" = None
    device_lost: bool = False

    def __str__(self) -> str:
        """Return the message for the clients of the step: a later step's error only refers to the earlier failure."""
        if self.cause is not None:
            return f"failed because of step {self.cause.step}: {self.cause}"
        return f"{type(self.error).__name__}: {self.error}"


def always_works() -> None:
    """The check of a device that is never lost, like a CPU."""


class Failures:
    """The distinction between a step's own failure and the consequence of an earlier step's failure.

    A step that is launched before an earlier one's failure is known depends on the failed step: on tokens that were
    never drawn, on a device that reports an error late. ``check_device`` raises if the device can't run another step:
    then only a new process helps.
    """

    def __init__(self, check_device: Callable[[], None] = always_works) -> None:
        self._check_device = check_device
        self._root: StepFailure | None = None

    def failure(self, step: int, error: Exception) -> StepFailure:
        """Return the failure of a step, with its cause if an earlier step caused it. Report steps in their order."""
        root = self._root
        if root is not None and (root.device_lost or step - root.step < MAX_STEPS_IN_FLIGHT):
            return StepFailure(step, error, cause=root, device_lost=root.device_lost)
        self._root = StepFailure(step, error, device_lost=not self._device_works())
        return self._root

    def _device_works(self) -> bool:
        try:
            self._check_device()
        except Exception:  # its kind doesn't matter: the step's own error is more precise
            return False
        return True
