"""A tier whose loads don't end: it costs the blocks of one copy, and the worker goes on serving."""

from core_driver import DECODE, Worker, of
from splitserve.engine.effects import StartCopy
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.tiers.commands import CancelCommand, CopyCommand, CopyResult
from splitserve.protocol.messages.requests import LocalRequest
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.simulation.model import ROUTER

PROMPTS = [[first + 1] * 4 + [first + 2] * 8 + [1] for first in range(20)]  # three full blocks each
NUM_BLOCKS_OF_A_PROMPT = 3


class WorkerWithATier:
    """A mixed worker of 32 blocks with a tier that holds the prompts, most of which are not on the device."""

    def __init__(self) -> None:
        self.worker = Worker(Role.MIXED, DECODE, num_blocks=32, num_slots=256)
        self.pool = self.worker.core.state.blocks.pool
        self.stuck: list[CopyCommand] = []  # loads, oldest first: the first has begun and does not end
        self.is_stuck = False
        self.num_requests = 0
        for prompt in PROMPTS:
            assert self.is_served(prompt)
        self.is_stuck = True

    @property
    def num_quarantined(self) -> int:
        return self.pool.count(BlockState.QUARANTINED)

    def send(self, *prompts: list[int]) -> list[RequestKey]:
        keys = [RequestKey(f"r{self.num_requests + number}") for number in range(len(prompts))]
        self.num_requests += len(prompts)
        for key, prompt in zip(keys, prompts, strict=True):
            self._copy(self.worker.hear(ROUTER, LocalRequest(key, prompt, SamplingParams(max_tokens=1), 600.0)))
        return keys

    def is_served(self, *prompts: list[int]) -> bool:
        """Return whether requests with these prompts, sent at once, end within a minute."""
        keys, end = self.send(*prompts), self.worker.now + 60.0
        while any(key in self.worker.core.state.sequences for key in keys):
            if self.worker.now >= end:
                return False
            self.round()
        return True

    def round(self) -> None:
        """Pass a quarter of a second: copies, except stuck ones, and a step."""
        worker = self.worker
        self._copy(worker.tick(0.25))
        plan = worker.plan()
        if plan is not None:
            self._copy(worker.commit(plan))

    def _copy(self, effects: list[object]) -> None:
        """End the copies that began, until only stuck loads are left; cancelled ones behind the first end at once."""
        commands = [effect.command for effect in of(effects, StartCopy)]
        while commands:
            command = commands.pop(0)
            if isinstance(command, CopyCommand) and command.is_load and self.is_stuck:
                self.stuck.append(command)
            elif isinstance(command, CopyCommand):
                commands += self._end(CopyResult(command.copy_id, len(command.block_ids)))
            elif isinstance(command, CancelCommand) and command.copy_id in [copy.copy_id for copy in self.stuck[1:]]:
                self.stuck = [copy for copy in self.stuck if copy.copy_id != command.copy_id]
                commands += self._end(CopyResult(command.copy_id, 0, was_dropped=True))

    def end_the_stuck_copy(self) -> None:
        self.is_stuck = False
        copy = self.stuck.pop()
        self._end(CopyResult(copy.copy_id, len(copy.block_ids)))

    def _end(self, result: CopyResult) -> list[object]:
        self.worker.core.handle_copy_result(result, self.worker.now)
        return [effect.command for effect in of(self.worker.tick(), StartCopy)]


def test_a_load_that_hangs_costs_the_blocks_of_one_copy() -> None:
    tier = WorkerWithATier()
    for prompt in PROMPTS[:14]:
        assert tier.is_served(prompt)
        assert tier.num_quarantined == NUM_BLOCKS_OF_A_PROMPT, "the tier isn't looked up any more"
    assert len(tier.stuck) == 1
    assert tier.is_served([33, 34, 35, 36, 37]), "a prompt in no tier"
    counters = tier.worker.core.load()
    assert counters.tier_failures == 1, "one load was abandoned"


def test_loads_behind_one_that_hangs_are_dropped() -> None:
    """Requests that came before it was abandoned wait for copies that have not begun."""
    tier = WorkerWithATier()
    assert tier.is_served(*PROMPTS[:4])
    assert tier.worker.core.load().tier_failures > 1
    assert tier.num_quarantined == NUM_BLOCKS_OF_A_PROMPT
    assert len(tier.stuck) == 1


def test_a_tier_is_used_again_once_the_late_load_has_ended() -> None:
    tier = WorkerWithATier()
    assert tier.is_served(PROMPTS[0])
    tier.end_the_stuck_copy()
    assert tier.num_quarantined == 0
    num_loaded = tier.worker.core.load().tier_loaded_blocks
    assert tier.is_served(PROMPTS[8])
    assert tier.worker.core.load().tier_loaded_blocks == num_loaded + NUM_BLOCKS_OF_A_PROMPT
    tier.worker.assert_idle()
