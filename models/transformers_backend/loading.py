"""Loads a checkpoint as a model of transformers' code. The library reads the files, and knows their old names."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch.nn.modules.module import register_module_parameter_registration_hook

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.kernels.api import Kernels
from splitserve.kernels.registry import select_kernels
from splitserve.models.config import ModelConfig
from splitserve.models.transformers_backend.admission import read_config
from splitserve.models.transformers_backend.interface import PAGED
from splitserve.models.transformers_backend.model import TransformersModel
from splitserve.models.weights.checkpoint import read_records

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"

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

    ``config``: admitted (:mod:`.admission`). Beside the weights that stay there, the host needs memory for one
    parameter and what it is made of: a layer's fused experts are the largest. Raises
    :class:`CheckpointError` for files that can't be read, and for tensors that are missing, unexpected or misshapen.
    """
    directory = Path(path)
    if kernels is None:
        kernels = select_kernels(device, dtype, head_dim=config.head_dim)
    module = load_module(directory, dtype=dtype, device=device, load_format=load_format)
    logger.info("%s: transformers' code, with paged attention", config.architecture)
    return TransformersModel(config, module, kernels, dtype=dtype, device=device)


def load_module(
    directory: Path, *, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
) -> torch.nn.Module:
    """Return the model of transformers' code on ``device``, as :func:`load_transformers_model` does."""
    model_class, transformers_config = read_config(directory)
    if load_format == "dummy":
        module = model_class._from_config(transformers_config, attn_implementation=PAGED, dtype=dtype)
    else:
        read_records(directory)  # checks the files' headers
        transformers.logging.disable_progress_bar()
        try:
            with _one_after_another(), _arriving_on(device):
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
    moved: torch.nn.Module = module.to(device)
    return moved


@contextmanager
def _one_after_another() -> Iterator[None]:
    """Let transformers read and convert one parameter at a time: its threads would read ahead without a bound."""
    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before


@contextmanager
def _arriving_on(device: torch.device) -> Iterator[None]:
    """Move each parameter to ``device`` when a module gets it, so that the host never holds two of a GPU's."""

    def moved(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta or parameter.device == device:
            return None
        arrived = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        arrived.__dict__.update(parameter.__dict__)  # with the note that it isn't to be initialised
        return arrived

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # what it returns is registered
    try:
        yield
    finally:
        hook.remove()


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
