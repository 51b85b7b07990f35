"""Philox4x32-10 against Random123's known answers, and the keying of words by id."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.kernels.reference import philox

pytestmark = pytest.mark.usefixtures("one_thread")

U32 = 0xFFFFFFFF
KNOWN_ANSWERS = [  # counter, key, output: kat_vectors of Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((U32, U32, U32, U32), (U32, U32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_known_answers_as_numbers_and_as_tensors() -> None:
    for counter, key, expected in KNOWN_ANSWERS:
        assert philox.philox4x32(counter, key) == expected
        lanes = tuple(torch.full((3,), word, dtype=torch.int64) for word in counter)
        words = philox.philox4x32(lanes, key)  # type: ignore[arg-type]
        assert [word.tolist() for word in words] == [[word] * 3 for word in expected]


def test_mixed_numbers_and_tensors_agree_with_pure_numbers() -> None:
    ids = torch.tensor([0, 1, 77, 2**31])
    words = philox.philox4x32((ids, 5, 6, 7), (8, 9))
    for lane, first in enumerate(ids.tolist()):
        expected = philox.philox4x32((first, 5, 6, 7), (8, 9))
        assert tuple(int(word[lane]) for word in words) == expected  # type: ignore[index]


def test_a_range_gives_the_words_of_its_ids() -> None:
    for count in (1, 3, 4, 5, 1000):
        full = philox.words_of_range(count, 2**64 - 1, 3, 70000, torch.device("cpu"))
        ids = torch.arange(count)
        assert torch.equal(full, philox.words_of_ids(ids, 2**64 - 1, 3, 70000))
        some = ids.flip(0)[: count // 2 + 1]
        assert torch.equal(full[some], philox.words_of_ids(some, 2**64 - 1, 3, 70000))


@settings(max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_every_part_of_the_key_changes_the_words(seed: int, choice: int, position: int) -> None:
    ids = torch.arange(64)
    base = philox.words_of_ids(ids, seed, choice, position)
    assert int(base.min()) >= 0 and int(base.max()) <= U32
    for other in ((seed ^ 1, choice, position), (seed ^ 2**40, choice, position)):
        assert not torch.equal(base, philox.words_of_ids(ids, *other))
    assert not torch.equal(base, philox.words_of_ids(ids, seed, choice ^ 1, position))
    assert not torch.equal(base, philox.words_of_ids(ids, seed, choice, position + 1))
    assert not torch.equal(base, philox.words_of_ids(ids, seed, choice, position + 2**32))


def test_words_are_uniform() -> None:
    words = philox.words_of_range(64 * 1024, 1, 0, 0, torch.device("cpu"))
    counts = torch.bincount(words >> 26, minlength=64).double()
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert 25 < chi_square < 125  # 63 degrees of freedom: each side about 1 in 100,000
