"""Tuned launch parameters: JSON files per device, looked up by operation, shape and rows.

A kernel has a frozen dataclass of its launch parameters and a safe default, for shapes that are not listed::

    launch = tuned(LinearLaunch(), "linear", shape_key(dtype, n=6144, k=4096), rows)

Files are called ``<slug of the device's name>.json``. Those in ``configs/`` are shipped; those in
:func:`user_directory` take precedence, one (operation, shape) at a time. What a device's files lack is taken from
those of another device with the same chip (:func:`chip`), such as H100 and H200. ``splitserve tune`` writes them
(:mod:`splitserve.kernels.tuning.tunables` describes how an operation takes part), holding :func:`tuner_lock`. A file
that can't be used causes one warning, and kernels use their defaults.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ParamSpec, Protocol, TypeVar, cast

import msgspec
import torch

SCHEMA_VERSION = 1
SHIPPED_DIRECTORY = Path(__file__).resolve().parents[1] / "configs"
DIRECTORY_VARIABLE = "SPLITSERVE_TUNED_DIR"

Param = int | str | bool
Params = Mapping[str, Param]
ParamsT = ParamSpec("ParamsT")
LaunchT = TypeVar("LaunchT")  # a frozen dataclass of launch parameters


class DeviceProperties(Protocol):
    """Properties of a device that name its chip, as :func:`torch.cuda.get_device_properties` returns them."""

    major: int
    minor: int
    multi_processor_count: int


_log = logging.getLogger(__name__)


class TuningError(Exception):
    """A file of tuned configurations, or a lock, can't be used; the message contains the remedy."""


class TunedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Best parameters found for ``max_rows`` rows; they apply to fewer rows as well, down to the preceding entry."""

    max_rows: int
    params: dict[str, Param]

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}; it must be positive")


class TunedFile(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a file: operation -> shape key (:func:`shape_key`) -> entries, ``max_rows`` ascending."""

    version: int
    device: str
    operations: dict[str, dict[str, list[TunedEntry]]]
    chip: str = ""  # the device's, as in :func:`chip`; empty: not known

    def __post_init__(self) -> None:
        for operation, shapes in self.operations.items():
            for shape, entries in shapes.items():
                rows = [entry.max_rows for entry in entries]
                if rows != sorted(set(rows)):
                    raise ValueError(f"max_rows of {operation} {shape!r} are {rows}; they must ascend")


class _Version(msgspec.Struct):
    version: int


def shape_key(dtype: torch.dtype, **sizes: int) -> str:
    """Return the files' key of a shape: ``shape_key(torch.bfloat16, n=6144, k=4096)`` is ``bfloat16 n=6144 k=4096``."""
    return " ".join([str(dtype).removeprefix("torch."), *(f"{name}={size}" for name, size in sizes.items())])


def device_slug(device_name: str) -> str:
    """Return the base name of a device's file: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def current_device_name() -> str | None:
    """Return the name of the current CUDA device; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def chip(properties: DeviceProperties) -> str:
    """Return what devices with equal best parameters have in common: ``9.0, 132 multiprocessors`` of H100 and H200."""
    return f"{properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors"


def current_chip() -> str:
    """Return the :func:`chip` of the current CUDA device; empty without one."""
    return chip(torch.cuda.get_device_properties()) if torch.cuda.is_available() else ""


def user_directory() -> Path:
    """Return ``$SPLITSERVE_TUNED_DIR``, else ``splitserve/tuned`` in the user's cache directory (XDG)."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "splitserve" / "tuned"


# ---- looking up ----


Table = dict[tuple[str, str], tuple[list[int], list[Params]]]  # (operation, shape) -> max_rows, their parameters


class TunedConfigs:
    """Tuned parameters of one device from the files in ``directories``; the first directory that lists a shape takes
    precedence. With ``chip_name`` (:func:`chip`) other devices' files in them fill the gaps."""

    def __init__(self, device_name: str, directories: Sequence[Path], chip_name: str = "") -> None:
        self._table: Table = {}
        self._others: Table = {}
        name = f"{device_slug(device_name)}.json"
        for directory in reversed(directories):
            _add(self._table, load_or_warn(directory / name))
            for path in sorted(directory.glob("*.json")) if chip_name else ():
                if path.name != name and (file := load_or_warn(path)) is not None and file.chip == chip_name:
                    _add(self._others, file)

    def find(self, operation: str, shape: str, rows: int) -> Params | None:
        """Return the parameters; see :func:`config_for`."""
        for table in (self._table, self._others):
            max_rows, params = table.get((operation, shape), ([], []))
            index = bisect_left(max_rows, rows)
            if index < len(params):
                return params[index]
        return None

    def entries(self, operation: str, shape: str) -> list[TunedEntry]:
        """Return all entries for ``shape``, ``max_rows`` ascending: the device's own, else those of another device."""
        own, others = self._table.get((operation, shape)), self._others.get((operation, shape))
        max_rows, params = own or others or ([], [])
        return [TunedEntry(rows, dict(each)) for rows, each in zip(max_rows, params, strict=True)]

    def known(self, operation: str, shape: str) -> list[Params]:
        """Return all different parameters listed for ``shape``, for whatever rows, other devices' last."""
        known: list[Params] = []
        for table in (self._table, self._others):
            _, params = table.get((operation, shape), ([], []))
            for each in params:
                if each not in known:
                    known.append(each)
        return known


def _add(table: Table, file: TunedFile | None) -> None:
    for operation, shapes in (file.operations if file else {}).items():
        for shape, entries in shapes.items():
            params: list[Params] = [MappingProxyType(entry.params) for entry in entries]
            table[operation, shape] = ([entry.max_rows for entry in entries], params)


_ANY_SHAPE = ""
_forced: dict[tuple[str, str], Params] = {}  # by operation and shape
_caches: list[Callable[[], None]] = []  # that are emptied when parameters change


def until_changed(function: Callable[ParamsT, LaunchT]) -> Callable[ParamsT, LaunchT]:
    """Remember the results of ``function``, launch parameters, until :func:`forced` or :func:`forget` changes them."""
    cached = functools.cache(function)
    _caches.append(cached.cache_clear)
    return cast(Callable[ParamsT, LaunchT], cached)


def config_for(operation: str, shape: str, rows: int) -> Params | None:
    """Return the tuned parameters of ``operation`` for ``shape`` (:func:`shape_key`) and ``rows``, on the current
    device: its own, else those of another device with its chip.

    None: nothing is listed, and the caller uses its safe default. Files are read once per process and a call is a
    look-up in a dict; still, call it where a plan or a layer is made rather than at each launch.
    """
    for forced_shape in (shape, _ANY_SHAPE):
        if (operation, forced_shape) in _forced:
            return _forced[operation, forced_shape]
    configs = _configs()
    return None if configs is None else configs.find(operation, shape, rows)


def tuned(default: LaunchT, operation: str, shape: str, rows: int, *, base: LaunchT | None = None) -> LaunchT:
    """Return :func:`config_for` in the form of ``default``, a frozen dataclass; fields that are not listed are those of
    ``base``, or of ``default`` without it.

    Without parameters ``default`` is returned. Those that it doesn't have, or of another type, cause one warning, and
    ``default`` is returned, too.
    """
    params = config_for(operation, shape, rows)
    if not params:
        return default
    found = default if base is None else base
    assert dataclasses.is_dataclass(found) and not isinstance(found, type)
    for name, value in params.items():
        if type(value) is not type(getattr(found, name, None)):
            _warn_of_param(operation, shape, name, value)
            return default
    return dataclasses.replace(found, **params)


@functools.cache
def _warn_of_param(operation: str, shape: str, name: str, value: Param) -> None:
    _log.warning(
        "tuned configurations of %s, %s, have %s = %r, which it doesn't accept; it uses its defaults; run "
        "'splitserve tune --operation %s' again",
        operation, shape, name, value, operation,
    )  # fmt: skip


@functools.cache
def _configs(device_name: str | None = None) -> TunedConfigs | None:
    name = device_name or current_device_name()
    return None if name is None else TunedConfigs(name, [user_directory(), SHIPPED_DIRECTORY], current_chip())


def forget() -> None:
    """Forget the files' content: the next :func:`config_for` reads them again."""
    _configs.cache_clear()
    _clear_caches()


@contextlib.contextmanager
def forced(operation: str, params: Params, shape: str = _ANY_SHAPE) -> Iterator[None]:
    """Make :func:`config_for` return ``params`` for ``operation`` within the context, whatever the rows, for tuners and
    tests. ``shape``: for this one alone."""
    before = _forced.get((operation, shape))
    _forced[operation, shape] = params
    _clear_caches()
    try:
        yield
    finally:
        if before is None:
            del _forced[operation, shape]
        else:
            _forced[operation, shape] = before
        _clear_caches()


def _clear_caches() -> None:
    for clear in _caches:
        clear()


# ---- files ----


def load(path: Path) -> TunedFile | None:
    """Read the file at ``path``; return None if there is none. Raises :class:`TuningError` if it can't be used."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TuningError(f"can't read tuned configurations from {path}: {error.strerror}") from error
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version != SCHEMA_VERSION:
            raise TuningError(
                f"tuned configurations in {path} have schema version {version}, this is version {SCHEMA_VERSION}; "
                "remove the file and run 'splitserve tune' again"
            )
        return msgspec.json.decode(content, type=TunedFile)
    except msgspec.DecodeError as error:
        raise TuningError(
            f"tuned configurations in {path} are invalid: {error}; remove the file and run 'splitserve tune' again"
        ) from error


def load_or_warn(path: Path) -> TunedFile | None:
    """Read a file like :func:`load`, but log a warning and return None if it can't be used."""
    try:
        return load(path)
    except TuningError as error:
        _log.warning("%s. Until then kernels use their defaults", error)
        return None


def record(
    directory: Path,
    device_name: str,
    operation: str,
    shape: str,
    entries: Sequence[TunedEntry],
    *,
    chip_name: str = "",
) -> Path:
    """Put ``entries`` for one shape into the device's file in ``directory``, keeping the rest; return its path.
    ``chip_name``: the device's (:func:`chip`); empty: as in the file.

    The file is replaced as a whole. Raises :class:`TuningError` rather than overwrite a file that it can't read.
    """
    path = directory / f"{device_slug(device_name)}.json"
    file = load(path) or TunedFile(SCHEMA_VERSION, device_name, {})
    ordered = sorted(entries, key=lambda entry: entry.max_rows)
    file.operations.setdefault(operation, {})[shape] = ordered
    file.chip = chip_name or file.chip
    file.__post_init__()
    save(path, file)
    return path


def save(path: Path, file: TunedFile) -> None:
    """Write ``file`` to a temporary file beside ``path`` and rename it. Raises :class:`TuningError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
            try:
                temporary.write(_text(file).encode())
                temporary.flush()
                os.fsync(temporary.fileno())
                os.fchmod(temporary.fileno(), 0o644)
                os.replace(temporary.name, path)
            except BaseException:
                os.unlink(temporary.name)
                raise
    except OSError as error:
        raise TuningError(
            f"can't write {path}: {error.strerror}; set {DIRECTORY_VARIABLE} or --output to a directory you may write"
        ) from error


def _text(file: TunedFile) -> str:
    """Return JSON with one entry per line, so that people can compare files."""
    operations = []
    for operation, shapes in sorted(file.operations.items()):
        blocks = []
        for shape, entries in sorted(shapes.items()):
            lines = ",\n".join(f"    {msgspec.json.encode(entry).decode()}" for entry in entries)
            blocks.append(f"   {json.dumps(shape)}: [\n{lines}\n   ]")
        operations.append(f"  {json.dumps(operation)}: {{\n" + ",\n".join(blocks) + "\n  }")
    head = f'{{\n "version": {file.version},\n "device": {json.dumps(file.device)},\n'
    head += f' "chip": {json.dumps(file.chip)},\n "operations": {{\n'
    return head + ",\n".join(operations) + "\n }\n}\n"


@contextlib.contextmanager
def tuner_lock(directory: Path | None = None) -> Iterator[None]:
    """Hold the lock of the one tuner that may run; it is released when the process ends, at the latest.

    Raises :class:`TuningError` at once if another tuner holds it, with its pid. ``directory`` None:
    :func:`user_directory`.
    """
    path = (directory or user_directory()) / "tune.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise TuningError(
            f"cannot open the tuner lock {path}: {error.strerror}; "
            f"set {DIRECTORY_VARIABLE} to a directory you may write"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise TuningError(
                f"another tuner is running (pid {holder} holds {path}): two at once would spoil each other's timings; "
                "wait for it or end it"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
