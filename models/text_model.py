"""The architecture that a config.json names, and its text model where the checkpoint has other parts. No torch here."""

from collections.abc import Mapping
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import shown
from splitserve.models.families.registry import FAMILIES, TEXT_BY_TYPE, TEXT_OF, WITH_TEXT
from splitserve.models.fields import ConfigFields

_SHARED = ("dtype", "torch_dtype", "quantization_config")
# The head is the whole's, so the whole says whether it is the embedding; and generation follows the whole's tokens.
_OF_WHOLE = ("tie_word_embeddings", "eos_token_id", "bos_token_id")


def has_family(raw: Mapping[str, Any]) -> bool:
    """Return whether there is a family for what a config.json describes."""
    return any(isinstance(name, str) and (name in FAMILIES or name in WITH_TEXT) for name in _architectures(raw))


def named_architecture(raw: Mapping[str, Any]) -> tuple[str, str]:
    """Return the family and the name that config.json has for it."""
    names = _architectures(raw)
    for name in names:
        if isinstance(name, str) and name in TEXT_BY_TYPE:
            return FAMILIES[_text_architecture(name, raw)], name
        if isinstance(name, str) and (name in FAMILIES or name in TEXT_OF):
            return FAMILIES[TEXT_OF.get(name, name)], name
    supported = ", ".join((*sorted(FAMILIES), *sorted(WITH_TEXT)))
    raise CheckpointError(
        f"config.json: architectures is {shown(names)}; supported are {supported}; others may run through transformers "
        "(--model-backend auto)"
    )


def text_config(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model of a checkpoint with other parts; what it lacks, the whole has."""
    text = ConfigFields(whole).mapping("text_config")
    if not text:
        raise CheckpointError("config.json: text_config is missing; it describes the text model")
    shared = {name: whole[name] for name in _SHARED if name in whole}
    of_whole = {name: whole[name] for name in _OF_WHOLE if whole.get(name) is not None}
    return {**shared, **text, **of_whole}


def _architectures(raw: Mapping[str, Any]) -> list[Any]:
    return ConfigFields(raw).items("architectures")


def _text_architecture(name: str, whole: Mapping[str, Any]) -> str:
    """Return the architecture of the text model of ``name``, an architecture with other parts."""
    kind, by_type = text_config(whole).get("model_type"), TEXT_BY_TYPE[name]
    if not isinstance(kind, str) or kind not in by_type:
        raise CheckpointError(
            f"config.json: {name}: text_config.model_type is {shown(kind)}; supported are {', '.join(by_type)}"
        )
    return by_type[kind]
