"""Loads a checkpoint as a model of transformers' code. The library reads the files, and knows their old names."""

import logging
from pathlib import Path

import torch
import transformers

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.kernels.api import Kernels
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.transformers_backend.admission import read_config
from splitserve.models.transformers_backend.interface import PAGED
from splitserve.models.transformers_backend.model import TransformersModel
from splitserve.models.weights.checkpoint import read_records

logger = logging.getLogger(__name__)


def load_transformers_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    kernels: Kernels | None = None,
) -> TransformersModel:
    """Load the checkpoint at ``path``, or make random weights of its shape (``load_format`` "dummy").

    ``config``: admitted (:mod:`.admission`). The host needs memory for all weights, for a GPU too. Raises
    :class:`CheckpointError` for files that can't be read, and for tensors that are missing, unexpected or misshapen.
    """
    directory = Path(path)
    if kernels is None:
        kernels = select_kernels(device, dtype, head_dim=config.head_dim)
    model_class, transformers_config = read_config(directory)
    if load_format == "dummy":
        module = model_class._from_config(transformers_config, attn_implementation=PAGED, dtype=dtype)
    else:
        read_records(directory)  # checks the files' headers
        transformers.logging.disable_progress_bar()
        try:
            module, found = model_class.from_pretrained(
                directory,
                config=transformers_config,
                dtype=dtype,
                attn_implementation=PAGED,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except Exception as error:  # of many kinds
            raise CheckpointError(f"transformers can't load {directory}: {error}") from error
        _check_found(found)
    logger.info("%s: transformers' code, with paged attention", config.architecture)
    return TransformersModel(config, module.to(device), kernels, dtype=dtype, device=device)


def _check_found(found: dict[str, object]) -> None:
    """Raise :class:`CheckpointError` unless files and model have the same tensors of the same shapes."""
    problems = {
        "missing_keys": "the checkpoint lacks {}; is config.json of another model?",
        "unexpected_keys": "the checkpoint has tensors that its config.json doesn't explain: {}",
        "mismatched_keys": "tensors of other shapes than config.json needs (name, stored, needed): {}",
        "error_msgs": "transformers reports {}",
    }
    for key, text in problems.items():
        names = found.get(key)
        if names:
            raise CheckpointError(text.format(few(sorted(map(str, names)))))  # type: ignore[call-overload]
