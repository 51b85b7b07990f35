"""Layers compute by the operations of :mod:`splitserve.kernels`.

On a GPU each operation of PyTorch between these is one more launch, and reads and writes memory once more: norms in
plain PyTorch were a fifth of a decode step of Gemma 3.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from family_runs import BLOCK_SIZE, CPU, NUM_BLOCKS, greedy
from splitserve.kernels.registry import OPERATIONS, select_kernels
from splitserve.models.config import load_model_config
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.loader import load_model
from transformers_models import NATIVE, write_transformers_model

pytestmark = pytest.mark.usefixtures("one_thread")

FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "flatten", "new_empty", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that compute nothing."""

BETWEEN_NORMS = ["new_zeros", "new_zeros"]  # what a product is added to that has a norm of its own
LEFT = {
    "ArceeForCausalLM": ["relu", "square"],
    "Gemma2ForCausalLM": BETWEEN_NORMS,
    "Gemma3ForCausalLM": BETWEEN_NORMS,
    "Glm4ForCausalLM": BETWEEN_NORMS,
    "GraniteForCausalLM": 2 * ["add_", "mul_", "new_zeros"],
    "Ministral3ForCausalLM": ["mul"],
    "NemotronForCausalLM": ["relu", "square"],
    "Olmo2ForCausalLM": BETWEEN_NORMS,
    "Olmo3ForCausalLM": BETWEEN_NORMS,
    "Starcoder2ForCausalLM": ["add_", "gelu"],
}
"""Those of one layer in plain PyTorch; other families have none."""


class OutsideKernels(TorchDispatchMode):
    """Notes the operations that compute something, and that no module of kernels calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        if name not in FREE and not _caller().startswith("splitserve.kernels."):
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the module of the innermost function of ours."""
    frame = sys._getframe(2)
    while not frame.f_globals["__name__"].startswith("splitserve."):
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


@pytest.mark.parametrize("architecture", NATIVE)
def test_what_a_layer_computes_outside_of_kernels(architecture: str, tmp_path: Path) -> None:
    write_transformers_model(tmp_path, architecture, vocab_size=128)
    kernels = select_kernels(CPU, torch.float32, dict.fromkeys(OPERATIONS, "reference"))
    model = load_model(tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU, kernels=kernels)
    layers: list[Callable[..., None]] = model.decoder.layers  # type: ignore[assignment]
    noted, layer = OutsideKernels(), layers[1]

    def noting(*arguments: Any) -> None:
        with noted:
            layer(*arguments)

    layers[1] = noting
    greedy(ModelRunner(model, torch.full((NUM_BLOCKS, *model.config.block_shape(BLOCK_SIZE)), torch.nan)), [77], 64, 1)
    assert sorted(noted.names) == sorted(LEFT.get(architecture, []))
