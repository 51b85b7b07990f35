"""Refusals of operators' acts on workers. The HTTP layer turns them into answers. Pure."""

from enum import StrEnum


class RefusalReason(StrEnum):
    """The reason why an operator's act on a worker was refused."""

    UNKNOWN_WORKER = "unknown_worker"  # there is no worker with this name
    PAUSED = "paused"  # it is frozen
    NOT_READY = "not_ready"  # it has no link
    LAST_WORKER = "last_worker"  # the last of its role, which only `force` drains
    NO_WORKER = "no_worker"  # its link takes no message now


class OperationRefusedError(Exception):
    """An operator's act on a worker that can't be carried out, as the text says for the operator."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
