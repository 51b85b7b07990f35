"""The other ranks of a tensor-parallel worker, as the worker sees them: started, driven step by step, watched.

Ranks stand and fall together. When one is lost, the others' collectives fail too, or hang: so what is shown is the
first failure that isn't the consequence of another one, and then the worker ends.
"""

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import msgspec

from splitserve.common.errors import SplitserveError
from splitserve.kvconnector.ranks.transfers import TransferRankError
from splitserve.models.parallel.ranks import CollectiveError
from splitserve.protocol.config import CoreAffinity, EngineConfig
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import StepPlan
from splitserve.worker.ranks.messages import RankFailed, RankOrder, RankReport
from splitserve.worker.ranks.starts import StartedRank, start_program, start_rank, thread_variables

logger = logging.getLogger(__name__)

BLAME_SECONDS = 1.0
"""The time to wait for the cause of a failure that looks like a consequence."""

CLOSE_SECONDS = 2.0


class RankError(SplitserveError):
    """A rank of a tensor-parallel worker is lost, and the worker with it."""


class _Rank:
    """One rank's process."""

    def __init__(self, order: RankOrder, started: StartedRank) -> None:
        self.name = order.name
        self.link, self.reports = started.link, started.reports
        self._steps, self._life_line, self._process = started.steps, started.life_line, started.process
        self._ended = threading.Event()
        try:
            self._life_line.write(msgspec.json.encode(order) + b"\n")
            self._life_line.flush()
        except BrokenPipeError:
            pass  # it died before it could read: the thread that watches it reports that

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, step: bytes) -> None:
        """Raises OSError if it is gone."""
        self._steps.send_bytes(step)

    def wait(self) -> int:
        """Wait for the process to end; return its exit status. Called by the thread that watches it."""
        status = self._process.wait()
        self._ended.set()
        return status

    def kill(self) -> None:
        """End it at once, if it hasn't ended yet."""
        self._process.kill()

    def end(self, deadline: float) -> None:
        """Let it end, and if it hasn't by ``deadline`` (monotonic), kill it."""
        self._steps.close()
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            logger.warning("%s doesn't end: killing it", self.name)
            self.kill()
            self._ended.wait()
        self._life_line.close()
        self.link.close()


class Ranks:
    """Ranks 1 to n - 1 of this worker, which is rank 0. Start it from the main thread: the kernel ends them with it."""

    def __init__(
        self,
        party: Party,
        role: Role,
        engine: EngineConfig,
        store_port: int,
        on_failure: Callable[[RankError], None],
        *,
        affinity: CoreAffinity | None = None,
        started: Sequence[StartedRank] = (),
    ) -> None:
        """``engine``: with the number of threads of one rank. ``on_failure`` is called once, from a thread.
        ``affinity`` of the worker; None: its processes go where they like. ``started``: ranks to use, before others
        are started."""
        self._engine_id = party.engine_id
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._failures: list[RankFailed] = []
        self._num_ready = 0
        self._broken = False  # no step can run any more
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder(enc_hook=list)
        threads = thread_variables(engine.threads)
        start = functools.partial(start_program, threads=engine.threads)
        waiting = list(started)
        self._ranks: list[_Rank] = []
        for rank in range(1, engine.tensor_parallel_size):
            order = RankOrder(
                party=party,
                role=role,
                rank=rank,
                engine=engine,
                affinity=affinity or CoreAffinity(),
                store_port=store_port,
                environment={**threads, **{name: os.environ[name] for name in os.environ if name.startswith("UCX_")}},
                log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
            )
            self._ranks.append(_Rank(order, waiting.pop(0) if waiting else start_rank(start)))
        self._threads = [threading.Thread(target=self._watch, args=(rank,), daemon=True) for rank in self._ranks]
        self._threads.append(threading.Thread(target=self._tell_failure, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @property
    def links(self) -> list[Connection]:
        """One for the connector of each rank; closed when it has ended."""
        return [rank.link for rank in self._ranks]

    def wait_until_ready(self) -> None:
        """Raises :class:`RankError` if one fails instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self._num_ready == len(self._ranks))
        if self._failures:
            raise self.explain(CollectiveError("a rank failed"))

    def send(self, plan: StepPlan) -> None:
        """Have all of them run ``plan`` next. Raises :class:`CollectiveError`."""
        step = self._encoder.encode(plan)
        for rank in self._ranks:
            try:
                rank.send(step)
            except OSError as error:
                raise CollectiveError(f"{rank.name} takes no step: {error}") from error

    def explain(self, error: Exception) -> Exception:
        """Return the cause of ``error``, which an operation with other ranks raised. From now on :meth:`check` fails.

        The cause is ``error`` itself, unless it is a consequence: then it is the first failure of another rank, if one
        is reported in time.
        """
        with self._changed:
            self._broken = True
            if not isinstance(error, CollectiveError | TransferRankError):
                return error
            self._changed.wait_for(self._has_cause, BLAME_SECONDS)
            return self._first_failure() if self._failures else error

    def check(self) -> None:
        """Raises :class:`RankError` if no step can run any more."""
        if self._broken or self._failures:
            raise RankError(f"the ranks of {self._engine_id} are out of step")

    def close(self) -> None:
        """End them all: in order if they can, at once if they haven't all started."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._num_ready < len(self._ranks):
            self.kill()
        deadline = time.monotonic() + CLOSE_SECONDS
        for rank in self._ranks:
            rank.end(deadline)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def kill(self) -> None:
        """End them at once."""
        for rank in self._ranks:
            rank.kill()

    def _watch(self, rank: _Rank) -> None:
        """Read the rank's reports until it has ended."""
        decoder = msgspec.json.Decoder(RankReport)
        has_reported = False
        with rank.reports:
            for line in rank.reports:
                report = decoder.decode(line)
                if isinstance(report, RankFailed):
                    has_reported = True
                    self._note(msgspec.structs.replace(report, message=f"{rank.name}: {report.message}"))
                else:
                    with self._changed:
                        self._num_ready += 1
                        self._changed.notify_all()
        returncode = rank.wait()
        if not has_reported:
            self._note(RankFailed(f"{rank.name} {_describe_exit(returncode)}", is_consequence=False))

    def _note(self, failure: RankFailed) -> None:
        with self._changed:
            if not self._closing:
                self._failures.append(failure)
                self._changed.notify_all()

    def _has_cause(self) -> bool:
        return any(not failure.is_consequence for failure in self._failures)

    def _first_failure(self) -> RankError:
        """The first one that isn't the consequence of another, if there is one."""
        return RankError(min(self._failures, key=lambda failure: failure.is_consequence).message)

    def _tell_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self._closing)
            if self._closing:
                return
            self._changed.wait_for(lambda: self._has_cause() or self._closing, BLAME_SECONDS)
            if self._closing:
                return
            error = self._first_failure()
        self._on_failure(error)


def _describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
