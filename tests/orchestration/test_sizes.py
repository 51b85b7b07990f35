"""Sizes in bytes, as text and from text."""

import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("10B", 10),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5g", 3 * 2**29),
        ("8 k", 8192),
        ("1TiB", 2**40),
        ("0", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "-1", "3x", "1ib", "1.g", "1e9", "GiB", "1 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="not an amount of memory"):
        parse_bytes(text)


def test_sizes_as_text() -> None:
    assert [format_bytes(value) for value in (0, 1023, 1024, 3 * 2**19, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.00 GiB",
    ]
