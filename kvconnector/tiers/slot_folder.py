"""The disk tier's files: a private folder with a file per slot, each with a header that describes its content."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitserve.common.errors import ConfigError

HEADER_BYTES = 4096
_LOCK_POLL_SECONDS = 0.05
_MAGIC = b"SPLITKV1"
_FIELDS = struct.Struct("<8s16s16sQ16s")  # magic, root hash, block's hash, bytes of the block, checksum


Bytes = npt.NDArray[np.uint8]


class Header(NamedTuple):
    """Header of a slot's file."""

    root: bytes  # splitserve.protocol.block_hash.shard_root
    block_hash: bytes
    num_bytes: int
    checksum: bytes  # of the other fields and the block's bytes

    @classmethod
    def of(cls, root: bytes, block_hash: bytes, data: Bytes) -> "Header":
        digest = hashlib.blake2b(root + block_hash + len(data).to_bytes(8, "little"), digest_size=16)
        digest.update(data)  # type: ignore[arg-type]  # an array is a buffer
        return cls(root, block_hash, len(data), digest.digest())

    @classmethod
    def parse(cls, data: bytes) -> "Header | None":
        """Decode a header; return None if ``data`` is not one."""
        if len(data) < _FIELDS.size:
            return None
        magic, *fields = _FIELDS.unpack(data[: _FIELDS.size])
        return cls(*fields) if magic == _MAGIC else None

    def encode(self) -> bytes:
        return _FIELDS.pack(_MAGIC, *self).ljust(HEADER_BYTES, b"\0")


FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(ConfigError):
    """The disk has no room for the folder."""


class SlotFolder:
    """The files of one rank, accessed through the folder's descriptor: later changes to the path have no effect.

    The folder must be this user's, and is made private to them; links are never followed. Raises :class:`ConfigError`
    if the folder can't be written to or belongs to another user, or if another process still uses it after
    ``lock_seconds``.
    """

    def __init__(self, path: Path, root: bytes, num_slots: int, block_bytes: int, *, lock_seconds: float = 0.0) -> None:
        self.path = path
        self._root = root
        self._num_slots = num_slots
        self._file_bytes = HEADER_BYTES + block_bytes
        self._folder = private_folder(path)
        try:
            self._lock = self.open("lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            os.close(self._folder)
            raise _unusable(path, error) from error
        if not _has_locked(self._lock, lock_seconds):
            self.close()
            raise ConfigError(f"--disk-kv-dir: another process uses {path}; give each cluster its own")

    def slot(self, number: int) -> str:
        """Return the name of a slot's file."""
        return f"{number:08d}.kv"

    def open(self, name: str, flags: int) -> int:
        """Open a file of this folder; a link is an error (ELOOP)."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._folder)

    def create(self, name: str, flags: int) -> int:
        """Open a new file for reading and writing, replacing any file with that name."""
        self.remove(name)
        return self.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | flags)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, name: str) -> None:
        """Remove a file, or a link, if it is there."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self._folder)

    def contents(self) -> list[tuple[bytes, int]]:
        """Return hash and slot of every whole file, least recently used first. Removes all other files, and the older
        of two files with the same content."""
        found: dict[bytes, tuple[int, int]] = {}
        for name in self._names():
            entry = self._entry(name)
            if entry is None:
                self.remove(name)
                continue
            block_hash, this = entry
            other = found.get(block_hash)
            if other is not None:
                self.remove(self.slot(min(this, other)[1]))
            found[block_hash] = this if other is None else max(this, other)
        return [(block_hash, number) for block_hash, (_, number) in sorted(found.items(), key=lambda item: item[1])]

    def clear(self) -> None:
        for name in self._names():
            self.remove(name)

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)

    def check(self, file: int) -> str:
        """Return the problem of an open slot's file as a file; "" if there is none."""
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            return "is not a regular file of this user"
        return "" if state.st_size == self._file_bytes else "is truncated"

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.endswith((".kv", ".kv.new"))]

    def _entry(self, name: str) -> tuple[bytes, tuple[int, int]] | None:
        """Return hash, time of last use and slot of a file; None if it is not one of this tier's files."""
        stem = name.removesuffix(".kv")
        if stem == name or not stem.isdigit() or int(stem) >= self._num_slots or self.slot(int(stem)) != name:
            return None
        try:
            with contextlib.ExitStack() as stack:
                file = self.open(name, os.O_RDONLY | os.O_NONBLOCK)
                stack.callback(os.close, file)
                if self.check(file):
                    return None
                header = Header.parse(os.pread(file, HEADER_BYTES, 0))
                used_at = os.fstat(file).st_mtime_ns
        except OSError:
            return None
        return (header.block_hash, (used_at, int(stem))) if header is not None and header.root == self._root else None


def private_folder(path: Path) -> int:
    """Create ``path`` if needed, make it private to this user, and return its descriptor. Raises
    :class:`ConfigError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.is_symlink():
            raise ConfigError(f"--disk-kv-dir: {path} is a link; remove it, or choose another directory")
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        owner = os.fstat(folder).st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"--disk-kv-dir: {path} belongs to user {owner}, this process to user {os.geteuid()}; "
                "choose a directory that no other user writes to"
            )
        os.fchmod(folder, 0o700)
    except OSError as error:
        os.close(folder)
        raise _unusable(path, error) from error
    except ConfigError:
        os.close(folder)
        raise
    return folder


def _unusable(path: Path, error: OSError) -> ConfigError:
    kind = DiskFullError if error.errno in FULL else ConfigError
    return kind(f"--disk-kv-dir: can't write to {path}: {error.strerror}")


def _has_locked(file: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return True
