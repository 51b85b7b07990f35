"""Checkpoints of GPT-OSS with experts in MXFP4, as its releases have them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
LARGEST = 6.0
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks uint8 [..., groups, 16] and scales uint8 [..., groups] near ``matrix`` [..., K]."""
    groups = matrix.float().unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1) / LARGEST).log2().ceil().clamp(-127, 127)
    numbers = groups / torch.exp2(exponents).unsqueeze(-1)
    nearest = (numbers.abs().unsqueeze(-1) - VALUES).abs().argmin(-1) + 8 * (numbers < 0)
    low, high = nearest.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4), (exponents + 127).to(torch.uint8)


def pack_experts(path: Path) -> None:
    """Rewrite the checkpoint ``path`` with its experts' matrices in MXFP4."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensor.transpose(1, 2))
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
