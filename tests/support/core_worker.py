"""A worker's core over a real model, in this process, without a loop. Not a test module."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from splitserve.engine.core import EngineCore
from splitserve.engine.effects import Send
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.models.parallel.ranks import Alone
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.requests import LocalRequest, StepTokens, TokenDelta
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.simulation.model import PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector
from splitserve.worker.build import BlockMemory, ModelBounds, build_core
from splitserve.worker.start.served_model import ServedModel, load_served_model

CPU = torch.device("cpu")
ME = Party("mixed-0", 11)
BLOCK_SIZE = 16


class CoreWorker:
    """A worker that computes requests one step after another, and checks its invariants after each.

    ``kv_bytes``: of KV memory; 0: as much as a worker takes by default.
    """

    def __init__(
        self, model: Path, *, kv_bytes: int, max_num_seqs: int = 4, max_model_len: int = 400, backend: str = "auto"
    ) -> None:
        engine = EngineConfig(
            model=str(model),
            model_backend=backend,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=48,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kv_memory_bytes=kv_bytes,
        ).on("cpu")
        self.served: ServedModel = load_served_model(engine, CPU, Alone(), lambda _stage, _detail: None)
        memory = self.served.memory
        for view in memory.kernel_views:
            view.fill_(float("nan"))  # whatever is read without having been written shows
        config = WorkerConfig(engine_id=ME.engine_id, role=Role.MIXED, engine=engine, membership="", protocol=PROTOCOL)
        others = [group.generations for group in memory.groups[1:]]
        self.core: EngineCore = build_core(
            config,
            ME,
            BlockMemory(memory.layout, memory.generations, other_generations=others),
            SimConnector(ME, memory.num_blocks),  # type: ignore[arg-type]
            ModelBounds(self.served.max_model_len, self.served.vocab_size),
        )
        self.deltas: dict[int, list[TokenDelta]] = {}  # by the prompt's index
        self._numbers = itertools.count()

    @property
    def pools(self) -> list[int]:
        """The blocks that sequences hold, in each group."""
        return [pool.count(BlockState.REFERENCED) for pool in self.core.state.blocks.pools]

    @property
    def num_cached_tokens(self) -> list[int]:
        """The tokens of each prompt of the last run that were found."""
        return [max(delta.num_cached_tokens for delta in deltas) for deltas in self.deltas.values()]

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Hand requests to the core."""
        for index, prompt in enumerate(prompts):
            request = LocalRequest(
                RequestKey(f"{next(self._numbers)}-{index}", 0),
                prompt,
                SamplingParams(max_tokens=max_tokens, temperature=0.0),
                60.0,
            )
            self.core.handle(Envelope(ROUTER, ME, request), 0.0)

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the tokens after each prompt, computed at once as far as there is room."""
        self.deltas = {index: [] for index in range(len(prompts))}
        self.ask(prompts, max_tokens)
        while self.step() is not None:
            pass
        assert not any(self.pools)
        return [[token for delta in deltas for token in delta.token_ids] for deltas in self.deltas.values()]

    def step(self) -> object:
        """Run one step; None if there is nothing to run."""
        self.core.tick(0.0)
        plan = self.core.plan_step(0.0)
        if plan is not None:
            self.core.commit_step(self.served.runner.run(plan), 0.0)
            self.core.tick(0.0)
        self.core.check_invariants()
        for effect in self.core.take_effects():
            if isinstance(effect, Send) and isinstance(effect.body, StepTokens):
                for delta in effect.body.deltas:
                    self.deltas[int(delta.key.request_id.split("-")[1])].append(delta)
        return plan
