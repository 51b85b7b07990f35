"""Requirements of our own package metadata, by extra."""

import importlib.metadata
from collections.abc import Collection

from packaging.requirements import Requirement


def requirements_of(extras: Collection[str] = ("",)) -> list[Requirement]:
    """Return the requirements that apply on this platform with any of ``extras`` ("": without one).

    Raises :class:`importlib.metadata.PackageNotFoundError` if the package runs without being installed.
    """
    wanted = [Requirement(line) for line in importlib.metadata.requires("splitserve") or []]
    return [
        each
        for each in wanted
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def pip_arguments(extra: str) -> str:
    """Return the arguments of ``pip install`` for the packages of an extra, quoted for a shell."""
    try:
        added = [each for each in requirements_of([extra]) if each not in requirements_of()]
    except importlib.metadata.PackageNotFoundError:
        added = []
    return " ".join(f"'{each.name}{each.specifier}'" for each in added) or extra
