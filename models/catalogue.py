"""The list of architectures that are known by name: native ones, those through transformers, refused ones. No torch."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from splitserve.models.families.registry import FAMILIES, TEXT_BY_TYPE, TEXT_OF
from splitserve.models.transformers_backend.known import REFUSED, TESTED

Support: TypeAlias = Literal["native", "transformers", "refused"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A name that ``architectures`` of a config.json may have."""

    name: str
    support: Support
    note: str  # the family in a sentence, or the reason of a refusal; "" where there is nothing to say


def architectures() -> Iterator[Architecture]:
    """Yield the native architectures, those that were tested through transformers, and the refused ones."""
    for name, module in sorted(FAMILIES.items()):
        yield Architecture(name, "native", family_text(module))
    texts = {**TEXT_OF, **{name: " or ".join(by_type.values()) for name, by_type in TEXT_BY_TYPE.items()}}
    for name, text in sorted(texts.items()):
        yield Architecture(name, "native", f"The text model alone, as {text}.")
    for name in TESTED:
        yield Architecture(name, "transformers", "")
    for name, reason in REFUSED.items():
        yield Architecture(name, "refused", f"{reason[0].upper()}{reason[1:]}.")


def family_text(module: str) -> str:
    """Return the first sentence of a family's docstring."""
    text = " ".join((importlib.import_module(f"splitserve.models.families.{module}").__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."
