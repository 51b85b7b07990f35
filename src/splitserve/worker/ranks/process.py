"""Main of a worker's rank 1 and up: a program (:mod:`.starts`), or forked from the worker (:mod:`.forks`).

It runs the steps that it receives, in their order, and ends with its worker: in order when the steps' pipe ends, at
once when its life line ends. It ignores signals meant for the worker.
"""

import logging
import os
import queue
import signal
import sys
import threading
import time
from functools import partial
from io import FileIO
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import torch

from splitserve.common.errors import SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.common.parents import ask_for_death_signal
from splitserve.kvconnector.cuda.memory import make_context_current
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.ranks.transfers import RankTransfers
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.models.config import load_model_config
from splitserve.models.declared import shard_of
from splitserve.models.parallel.process_group import find_store, join_group
from splitserve.models.parallel.ranks import CollectiveError
from splitserve.models.runner.runner import ModelRunner, NonFiniteLogitsError
from splitserve.protocol.step import LaunchedStep, LaunchingRunner, StepPlan
from splitserve.worker.machine.threads import keep_near, pin_threads
from splitserve.worker.ranks.messages import RankFailed, RankOrder, RankReady, RankReport
from splitserve.worker.ranks.starts import RankEnds
from splitserve.worker.start.beside import Beside
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.kv_tiers import make_tiers
from splitserve.worker.start.served_model import device_of, load_served_model

logger = logging.getLogger(__name__)

_GONE_SECONDS = 0.3  # by then this process has ended with its worker, if that's why the others can't be reached


class RankProcess:
    """One rank: it receives steps, and reports that it is ready or has failed."""

    def __init__(self, order: RankOrder, ends: RankEnds, clock: StartClock) -> None:
        self._order = order
        self._clock = clock
        self._steps = Connection(ends.steps, writable=False)
        self._link = Connection(ends.link)
        for fd in (ends.steps, ends.reports, ends.link):
            os.set_inheritable(fd, False)
        self._reports = os.fdopen(ends.reports, "wb", buffering=0)
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def run(self) -> None:
        """Run steps until the worker needs no more."""
        clock = self._clock
        engine, size = self._order.engine, self._order.engine.tensor_parallel_size
        torch.set_num_threads(engine.threads)
        device = device_of(engine.device, self._order.rank, size)
        keep_near(device, self._order.affinity)
        shard = shard_of(
            load_model_config(engine.model, engine.model_backend), self._order.rank, size, engine.expert_parallel
        )
        with clock.phase("joining the other ranks"):
            group = join_group(find_store(self._order.store_port, size), shard, device)
        served = load_served_model(engine, device, group, lambda _stage, _detail: None, clock)
        making = Beside("transfers-start", partial(self._transfers, served.memory))
        served.warm_up(clock)
        transfers = making.wait()
        threading.Thread(target=self._carry_out, args=(transfers,), name="transfers", daemon=True).start()
        self._report(RankReady())
        logger.debug("ready after %s", clock)
        if served.runner.launcher is None:
            self._run_steps(served.runner)
        else:
            self._launch_steps(served.runner.launcher, device)

    def _transfers(self, memory: KVMemory) -> RankTransfers:
        """Return the transfers of this rank's heads, which rank 0's connector controls over the link."""
        order, engine = self._order, self._order.engine
        make_context_current(memory.device)
        settings = ReadSettings.of(memory.kind, num_threads=engine.read_threads, maps=engine.map_peer_memory)
        tiers = make_tiers(order.engine, order.party.engine_id, memory, order.rank)
        return RankTransfers(
            lambda wake: NixlConnector(order.party, memory, wake, rank=order.rank, settings=settings),
            self._link,
            tiers.stores,
            tiers.found(),
        )

    def _carry_out(self, transfers: RankTransfers) -> None:
        """Run transfers, on their cores: the threads that this one starts inherit its affinity."""
        try:
            pin_threads(self._order.affinity)
            transfers.run()
        except Exception as error:
            self.end_with(error)

    def end_with(self, error: BaseException) -> None:
        """Report ``error``, and end this process without another look at the device: it may never answer."""
        message = str(error) if isinstance(error, SplitserveError) else f"{type(error).__name__}: {error}"
        is_consequence = isinstance(error, CollectiveError)
        self._report(RankFailed(message, is_consequence=is_consequence))
        if is_consequence:
            time.sleep(_GONE_SECONDS)
        logger.error("this rank ends: %s", message, exc_info=None if is_consequence else error)
        logging.shutdown()
        os._exit(1)

    def _report(self, report: RankReport) -> None:
        try:
            self._reports.write(msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            logger.warning("the worker is gone")

    def _next_step(self) -> StepPlan | None:
        try:
            return self._decoder.decode(self._steps.recv_bytes())
        except EOFError:
            return None

    def _run_steps(self, runner: ModelRunner) -> None:
        while (plan := self._next_step()) is not None:
            try:
                runner.run(plan)
            except NonFiniteLogitsError as error:
                logger.debug("%s", error)  # rank 0 logs it

    def _launch_steps(self, launcher: LaunchingRunner, device: torch.device) -> None:
        """Another thread waits for them, so that an error of the device shows while this one waits for a step."""
        launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        arguments = (device, launched)
        waiter = threading.Thread(target=self._wait_for_steps, args=arguments, name="model-wait", daemon=True)
        waiter.start()
        while (plan := self._next_step()) is not None:
            launched.put(launcher.launch(plan))
        launched.put(None)
        waiter.join()

    def _wait_for_steps(self, device: torch.device, launched: "queue.SimpleQueue[LaunchedStep | None]") -> None:
        torch.cuda.set_device(device)  # a thread begins with the first one
        while (step := launched.get()) is not None:
            try:
                step.wait()
            except NonFiniteLogitsError as error:
                logger.debug("%s", error)
            except Exception as error:
                self.end_with(error)


def _end_with_worker(life_line: FileIO) -> None:
    life_line.read()
    os._exit(1)


def run_rank(ends: RankEnds) -> NoReturn:
    """Be the rank of the order on the life line."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    ask_for_death_signal(signal.SIGKILL)  # works even if no thread runs again, as when a driver's call hangs
    life_line = FileIO(ends.life_line, closefd=False)
    clock = StartClock()
    with clock.phase("the worker's order"):
        line = life_line.readline()
    if not line:  # the worker has ended before its ranks' start
        os._exit(0)
    order = msgspec.json.decode(line, type=RankOrder)
    os.environ.update(order.environment)
    set_up_logging(order.name, order.log_level)
    threading.Thread(target=_end_with_worker, args=(life_line,), name="life-line", daemon=True).start()
    process = RankProcess(order, ends, clock)
    try:
        process.run()
    except BaseException as error:
        process.end_with(error)
    logging.shutdown()
    os._exit(0)  # nothing here is worth the time that freeing a model takes


if __name__ == "__main__":
    run_rank(RankEnds(sys.stdin.fileno(), *map(int, sys.argv[1:])))
