"""The CUDA runner's mixed steps without a GPU."""

import torch
from torch import Tensor

from splitserve.models.decoder import DecoderModel
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.models.runner.runner import ModelRunner
from splitserve.protocol.step import ScheduledChunk


class HostRunner(CudaRunner):
    """Its tensors and graph inputs, without a device's stream."""

    def __init__(self, model: DecoderModel, kv_cache: Tensor) -> None:
        ModelRunner.__init__(self, model, kv_cache)
        self._max_blocks = 32
        self._drawn = torch.zeros(16, dtype=torch.int64)
        self._row_of_chunk = {}

    @torch.inference_mode()
    def filled_up(self, chunks: list[ScheduledChunk], size: MixedSize) -> Tensor:
        """Logits of the rows that draw, computed with the inputs and the plan of a graph of ``size``."""
        inputs = torch.zeros(4 * sum(size) + size.num_decodes + 4, dtype=torch.int64)
        plan = self._attention.make_mixed_plan(*size, 4, self._max_blocks)
        self._fill_mixed(inputs, plan, chunks, size)
        tokens = inputs[: 4 * sum(size)].view(4, sum(size))
        batch = self._forward_batch(tokens, inputs[4 * sum(size) :], plan)
        logits = self.model.forward(batch, self._kv_layers, self._attention)
        assert logits is not None
        return logits[: sum(one.sample is not None for one in chunks)]
