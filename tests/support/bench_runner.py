"""A runner on a CPU that takes launches as one on a GPU does, for the bench of a GPU's steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from splitserve.models.decoder import RunnableModel
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.step import StepOutput, StepPlan


class _Done:
    """A step that has run."""

    queued_at = 0.0

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


class LaunchingCpuRunner(ModelRunner):
    """Runs a step when it is launched. ``plans``: all of them, as they came."""

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: Tensor | Sequence[Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        model_dir: Path | None = None,
    ) -> None:
        super().__init__(model, kv_cache, model_dir=model_dir)
        self.limits = (max_num_seqs, max_model_len)
        self.plans: list[StepPlan] = []
        self._last: list[int | None] = []

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        assert len(plan.chunks) <= self.limits[0]
        assert all(chunk.start + len(chunk.token_ids) <= self.limits[1] for chunk in plan.chunks)
        chunks = [
            chunk
            if chunk.previous_chunk is None
            else replace(chunk, token_ids=[self._last[chunk.previous_chunk]], previous_chunk=None)
            for chunk in plan.chunks
        ]
        output = self.run(replace(plan, chunks=chunks))
        self._last = output.token_ids
        return _Done(output)

    def capture(self, sizes: Sequence[int]) -> float:
        return float(len(sizes))

    def capture_mixed(self, sizes: Sequence[MixedSize]) -> float:
        return float(len(sizes))
