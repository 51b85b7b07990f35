"""The CUDA runner's mixed steps without a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.models.decoder import RunnableModel
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.models.runner.inputs import StepInputs
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.step import ScheduledChunk


class HostRunner(CudaRunner):
    """Its tensors and graph inputs, without a device's stream."""

    def __init__(self, model: RunnableModel, kv_cache: Tensor | Sequence[Tensor]) -> None:
        ModelRunner.__init__(self, model, kv_cache)
        self._max_blocks = 32
        self._drawn = torch.zeros(16, dtype=torch.int64)
        self._inputs = StepInputs(self.cache)
        self._last_replay = None

    @torch.inference_mode()
    def filled_up(self, chunks: list[ScheduledChunk], size: MixedSize) -> Tensor:
        """Logits of the rows that draw, computed with the inputs and the plan of a graph of ``size``."""
        num_numbers = self._inputs.num_rows * sum(size)
        inputs = torch.zeros(num_numbers + size.num_decodes + 4, dtype=torch.int64)
        plan = self.cache.attention.make_mixed_plans(*size, 4, self._max_blocks)[0]
        self._inputs.fill_mixed(inputs, plan, chunks, size)
        batch = self._forward_batch(
            inputs[:num_numbers].view(self._inputs.num_rows, sum(size)), inputs[num_numbers:], plan
        )
        logits = self._forward(batch)
        assert logits is not None
        return logits[: sum(one.sample is not None for one in chunks)]
