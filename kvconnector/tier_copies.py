"""Carries out the copies that :class:`splitserve.kvconnector.tiers.Tiers` asks for, on threads beside the engine loop.

Each tier has a thread for each direction, so that what a request waits for isn't behind what goes down.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from splitserve.kvconnector.tiers import ClearCommand, CopyCommand, CopyResult

logger = logging.getLogger(__name__)


class PartialCopyError(Exception):
    """A copy that failed after its first ``num_good`` blocks."""

    def __init__(self, num_good: int, message: str) -> None:
        super().__init__(message)
        self.num_good = num_good


class TierStore(Protocol):
    """One tier's bytes. A call returns when its copy is complete; :meth:`store` and :meth:`load` may run at once.

    ``block_ids[i]`` of the device belongs to ``slots[i]`` of the tier, whose content is ``hashes[i]``. An exception
    means that nothing landed for sure, :class:`PartialCopyError` that the first blocks did. After either, nothing
    touches the blocks any more.
    """

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None: ...

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None: ...

    def clear(self) -> None:
        """Nothing that was stored so far may be found by another process, either. Called like :meth:`store`."""

    def close(self) -> None: ...


class TierCopies:
    """``stores`` by the names of their tiers; none at all is how tiers are off. ``wake`` is called from a thread when
    results are there."""

    def __init__(self, stores: Mapping[str, TierStore], wake: Callable[[], None]) -> None:
        self._stores = dict(stores)
        self._results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._workers = {
            (name, is_load): _CopyThread(name, is_load, store, self._results, wake)
            for name, store in self._stores.items()
            for is_load in (False, True)
        }

    def start(self, command: CopyCommand | ClearCommand) -> None:
        """A copy ends in one result, unless :meth:`close` comes first."""
        is_load = isinstance(command, CopyCommand) and command.is_load
        self._workers[command.tier, is_load].put(command)

    def results(self) -> list[CopyResult]:
        """Results since the last call."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self, timeout_seconds: float) -> None:
        """Let the copies under way end; those that wait are dropped."""
        for worker in self._workers.values():
            worker.stop()
        stopped = [worker.join(timeout_seconds) for worker in self._workers.values()]
        if all(stopped):  # else a thread still uses its store: the process's end closes it
            for store in self._stores.values():
                store.close()


class _CopyThread:
    """Copies of one tier in one direction, in order. Logs the first of several failures, and their end."""

    def __init__(
        self,
        tier: str,
        is_load: bool,
        store: TierStore,
        results: "queue.SimpleQueue[CopyResult]",
        wake: Callable[[], None],
    ) -> None:
        self._what = f"loads from {tier}" if is_load else f"stores to {tier}"
        self._store = store
        self._copy = store.load if is_load else store.store
        self._results = results
        self._wake = wake
        self._commands: queue.SimpleQueue[CopyCommand | ClearCommand | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=self._what.replace(" ", "-"), daemon=True)
        self._thread.start()

    def put(self, command: CopyCommand | ClearCommand) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        self._is_stopping = True
        self._commands.put(None)

    def join(self, timeout_seconds: float) -> bool:
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None and not self._is_stopping:
            if isinstance(command, ClearCommand):
                self._clear()
                continue
            self._results.put(self._carry_out(command))
            self._wake()

    def _clear(self) -> None:
        try:
            self._store.clear()
        except Exception as error:
            logger.error("what is in the tier can't be removed, and can't be trusted: %s", error)

    def _carry_out(self, command: CopyCommand) -> CopyResult:
        try:
            self._copy(command.block_ids, command.slots, command.hashes)
        except Exception as error:  # whatever it is: the blocks are computed, or stay where they are
            num_good = error.num_good if isinstance(error, PartialCopyError) else 0
            if not self._is_failing:
                logger.warning("%s fail: %s: %s", self._what, type(error).__name__, error)
            self._is_failing = True
            return CopyResult(command.copy_id, num_good, f"{type(error).__name__}: {error}")
        if self._is_failing:
            logger.info("%s work again", self._what)
        self._is_failing = False
        return CopyResult(command.copy_id, len(command.block_ids))
