"""Execution of the copies that :class:`splitserve.kvconnector.tiers.tiers.Tiers` requests, on threads separate from the
engine loop.

Each tier has a thread for each direction, so that a load that a request waits for is never queued behind stores.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from splitserve.kvconnector.tiers.commands import (
    AnyCommand,
    AnyResult,
    CancelCommand,
    ClearCommand,
    CopyCommand,
    CopyNearsEnd,
    CopyResult,
)
from splitserve.kvconnector.tiers.shared import ChainCopy, TierState

logger = logging.getLogger(__name__)
QUIET_SECONDS = 10.0
"""After a failure: a success sooner is no end of the failures."""


class PartialCopyError(Exception):
    """A copy that failed after its first ``num_good`` blocks."""

    def __init__(self, num_good: int, message: str) -> None:
        super().__init__(message)
        self.num_good = num_good


class TierFullError(PartialCopyError):
    """A store for which the tier lacks room, whatever its slots."""


class ToldError(PartialCopyError):
    """A partial copy whose error is already logged."""


class TierStore(Protocol):
    """Storage of one tier. A call returns when its copy is complete; :meth:`store` and :meth:`load` may run
    concurrently.

    Block ``block_ids[i]`` of the device belongs to slot ``slots[i]`` of the tier, with content ``hashes[i]``. An
    exception means that possibly no block has landed, :class:`PartialCopyError` that the first blocks have. After
    either, nothing touches the blocks any more.
    """

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None: ...

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None: ...

    def clear(self) -> None:
        """Make all stored content unfindable, also for other processes. Called like :meth:`store`."""

    def close(self) -> None: ...


@runtime_checkable
class GatedStore(TierStore, Protocol):
    """A :class:`TierStore` with loads that steps may wait for on the device."""

    def load_gated(
        self, copy_id: int, block_ids: Sequence[int], slots: Sequence[int], tell_near_end: Callable[[], None]
    ) -> None:
        """Load like :meth:`load`. Calls ``tell_near_end`` at most once: when a step that waits for the load may be
        launched."""


@runtime_checkable
class SharedStore(Protocol):
    """Storage of a tier that several workers share. Calls are like those of :class:`TierStore`; they return how many of
    the copy's blocks are there now. Fewer than all is not an error."""

    def open(self, tell: Callable[[TierState], None]) -> None:
        """Start looking for the tier, and report its state whenever it changes."""

    def store_chain(self, copy: ChainCopy) -> int: ...

    def load_chain(self, copy: ChainCopy) -> int: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


AnyStore: TypeAlias = TierStore | SharedStore


class TierCopier(Protocol):
    """Executor of copies, as the engine loop needs it."""

    def start(self, command: AnyCommand) -> None:
        """Start executing a command. A copy ends in one :class:`CopyResult`, unless :meth:`close` comes first; one
        that is cancelled before it has begun ends at once, also behind a copy that hangs."""

    def results(self) -> Sequence[AnyResult]:
        """Return the results since the last call."""

    def close(self, timeout_seconds: float) -> None:
        """Let the copies in flight end, and drop the waiting ones."""


class LocalTierCopier:
    """:class:`TierCopier` of one process. ``stores``: by tier name; empty if tiers are off.

    ``wake`` is called from a thread when results are available.
    """

    def __init__(self, stores: Mapping[str, AnyStore], wake: Callable[[], None]) -> None:
        self._stores = dict(stores)
        self._results: queue.SimpleQueue[AnyResult] = queue.SimpleQueue()
        self._wake = wake
        self._workers = {
            (name, is_load): _CopyThread(name, is_load, store, self._results, wake)
            for name, store in self._stores.items()
            for is_load in (False, True)
        }
        for store in self._stores.values():
            if isinstance(store, SharedStore):
                store.open(self._tell)

    def _tell(self, state: TierState) -> None:
        self._results.put(state)
        self._wake()

    def start(self, command: AnyCommand) -> None:
        """See :class:`TierCopier`."""
        if isinstance(command, CancelCommand):
            self._workers[command.tier, True].cancel(command.copy_id)
            return
        is_load = not isinstance(command, ClearCommand) and command.is_load
        self._workers[command.tier, is_load].put(command)

    def results(self) -> list[AnyResult]:
        """Return the results since the last call."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self, timeout_seconds: float) -> None:
        """Let the copies in flight end, and drop the waiting ones."""
        for worker in self._workers.values():
            worker.stop()
        stopped = [worker.join(timeout_seconds) for worker in self._workers.values()]
        if all(stopped):  # otherwise a thread still uses its store, which the end of the process closes
            for store in self._stores.values():
                store.close()


def _copy_all(
    copy: Callable[[Sequence[int], Sequence[int], Sequence[bytes]], None],
    command: CopyCommand,
) -> int:
    copy(command.block_ids, command.slots, command.hashes)
    return len(command.block_ids)


class _CopyThread:
    """Copies of one tier in one direction, in order. Logs the first of several failures, and their end: a success after
    :data:`QUIET_SECONDS` without one. A full disk has room for some blocks and not for the next."""

    def __init__(
        self,
        tier: str,
        is_load: bool,
        store: AnyStore,
        results: "queue.SimpleQueue[AnyResult]",
        wake: Callable[[], None],
    ) -> None:
        self._what = f"loads from {tier}" if is_load else f"stores to {tier}"
        self._store = store
        self._is_load = is_load
        self._copy = self._copy_of(store)
        self._results = results
        self._wake = wake
        self._commands: queue.SimpleQueue[CopyCommand | ChainCopy | ClearCommand | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # copies that have not begun and were not cancelled
        self._running: int | None = None  # the copy that has begun
        self._is_late = False  # it was cancelled
        self._is_stopping = False
        self._failed_at: float | None = None  # the last time; None: never, or it works again
        self._was_full = False  # once at least
        self._thread = threading.Thread(target=self._run, name=self._what.replace(" ", "-"), daemon=True)
        self._thread.start()

    def put(self, command: CopyCommand | ChainCopy | ClearCommand) -> None:
        if not isinstance(command, ClearCommand):
            with self._lock:
                self._waiting.add(command.copy_id)
        self._commands.put(command)

    def cancel(self, copy_id: int) -> None:
        """End a copy that has not begun. One that runs can't be ended; one that has ended is none of ours."""
        with self._lock:
            was_waiting, is_running = copy_id in self._waiting, copy_id == self._running
            self._waiting.discard(copy_id)
            self._is_late |= is_running
        if was_waiting:
            self._tell(CopyResult(copy_id, 0, was_dropped=True))
        elif is_running:
            logger.warning("%s take too long: the tier is not looked up until the abandoned one has ended", self._what)

    def _begin(self, copy_id: int) -> bool:
        """Begin a copy. Return False if it was cancelled before."""
        with self._lock:
            if copy_id not in self._waiting:
                return False
            self._waiting.remove(copy_id)
            self._running = copy_id
            return True

    def _end(self, result: CopyResult) -> None:
        with self._lock:
            was_late, self._is_late, self._running = self._is_late, False, None
        if was_late:
            logger.info("%s begin again: the abandoned one has ended, after %.1f s", self._what, result.seconds)
        self._tell(result)

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
            elif self._begin(command.copy_id):
                self._end(self._carry_out(command))

    def _clear(self) -> None:
        try:
            self._store.clear()
        except Exception as error:
            logger.error("cannot clear the tier, although its content can't be trusted: %s", error)

    def _copy_of(self, store: AnyStore) -> Callable[[Any], int]:
        """Return the function that executes a command and returns how many of its blocks are correct. It is chosen
        once, because checking an object against a Protocol is slow."""
        if isinstance(store, SharedStore):
            return store.load_chain if self._is_load else store.store_chain
        if self._is_load and isinstance(store, GatedStore):
            return partial(self._load_gated, store)
        return partial(_copy_all, store.load if self._is_load else store.store)

    def _load_gated(self, store: GatedStore, command: CopyCommand) -> int:
        near_end = CopyNearsEnd(command.copy_id)
        store.load_gated(command.copy_id, command.block_ids, command.slots, lambda: self._tell(near_end))
        return len(command.block_ids)

    def _tell(self, result: AnyResult) -> None:
        self._results.put(result)
        self._wake()

    def _carry_out(self, command: CopyCommand | ChainCopy) -> CopyResult:
        started = time.perf_counter()
        try:
            num_good = self._copy(command)
        except Exception as error:  # after any error the blocks are computed, or stay where they are
            num_good = error.num_good if isinstance(error, PartialCopyError) else 0
            is_full = isinstance(error, TierFullError)
            self._log_failure(error)
            seconds, text = time.perf_counter() - started, f"{type(error).__name__}: {error}"
            return CopyResult(command.copy_id, num_good, text, seconds, is_full=is_full)
        now = time.perf_counter()
        if self._failed_at is not None and now - self._failed_at > QUIET_SECONDS:
            logger.info("%s work again", self._what)
            self._failed_at = None
        return CopyResult(command.copy_id, num_good, None, now - started)

    def _log_failure(self, error: Exception) -> None:
        if isinstance(error, TierFullError):
            if not self._was_full:
                logger.warning("%s failed: %s; the tier goes on with what fits", self._what, error)
            self._was_full = True
        elif not isinstance(error, ToldError):
            if self._failed_at is None:
                logger.warning("%s failed: %s: %s", self._what, type(error).__name__, error)
            self._failed_at = time.perf_counter()
