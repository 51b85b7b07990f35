"""LMCache's shared memory: allocated by who keeps the server, mapped by workers before they need it."""

import os
import resource
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from splitserve.kvconnector.lmcache.connection import LMCacheError
from splitserve.kvconnector.lmcache.segment import PIECE_BYTES, SHARED_MEMORY, fault_in, map_segment
from splitserve.orchestration.lmcache import server as lmcache_server

SIZE = 5 * PIECE_BYTES // 2
PLACES = (0, PIECE_BYTES - 1, PIECE_BYTES + 4096, SIZE - 1)


@pytest.fixture
def segment() -> Iterator[Path]:
    """Without any pages but those of some bytes."""
    path = SHARED_MEMORY / f"splitserve-test-{secrets.token_hex(8)}"
    with path.open("xb") as file:
        file.truncate(SIZE)
        for place in PLACES:
            os.pwrite(file.fileno(), b"x", place)
    yield path
    path.unlink(missing_ok=True)


def num_pages(path: Path) -> int:
    return path.stat().st_blocks * 512 // 4096


def assert_whole(path: Path) -> None:
    content = np.fromfile(path, dtype=np.uint8)
    assert num_pages(path) == SIZE // 4096
    assert np.flatnonzero(content).tolist() == list(PLACES), "contents stay as they are"


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_pages_are_there_before_they_are_touched(segment: Path) -> None:
    pool = map_segment(f"/{segment.name}", SIZE)
    if sum(1 for _ in fault_in(pool)) == 0:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert_whole(segment)
    before = num_faults()
    pool[::4096] |= 2
    assert num_faults() - before < SIZE // 4096 / 10


def test_memory_that_is_not_there_is_an_error(segment: Path) -> None:
    """Whoever touched it would be killed."""
    pool = map_segment(segment.name, SIZE)
    os.truncate(segment, PIECE_BYTES)
    pieces = fault_in(pool)
    if next(pieces, pieces) is pieces:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    with pytest.raises(LMCacheError, match="no room"):
        next(pieces)


@pytest.mark.parametrize("name", ["", "/", "../x", "a/b", ".hidden"])
def test_what_is_no_name_of_a_segment(name: str) -> None:
    with pytest.raises(LMCacheError, match="invalid name"):
        map_segment(name, SIZE)


def test_a_segment_that_is_too_short(segment: Path) -> None:
    with pytest.raises(LMCacheError, match="but it announced"):
        map_segment(segment.name, SIZE + 1)


def test_a_server_has_its_memory_from_the_start(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_server, "PIECE_BYTES", PIECE_BYTES)
    is_over = threading.Event()
    is_over.set()
    before = num_pages(segment)
    lmcache_server.allocate(segment.name, is_over)
    assert num_pages(segment) == before
    is_over.clear()
    lmcache_server.allocate(segment.name, is_over)
    assert_whole(segment)


def test_room_that_is_gone_is_told(
    segment: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    lmcache_server.allocate(segment.name, threading.Event())
    assert "No space left on device; workers continue without it" in caplog.text
