"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A draw is a pure function of (key, counter): no state, no order. Words are held in int64 tensors, since PyTorch has no
unsigned 32-bit arithmetic. Integers are exact, so every backend and every machine gets the same words.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF

Word: TypeAlias = Tensor | int
"""A 32-bit word: an int64 tensor with values below 2**32, or one number for all lanes."""
DrawKey: TypeAlias = tuple[int, int, int]
"""Seed, choice and position."""


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Return the four output words for each counter. Words that are equal in all lanes may stay plain ints
    (cheaper)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + WEYL[0]) & _MASK
        k1 = (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: Word) -> tuple[Word, Word]:
    """Return the high and low 32 bits of the product. The int64 product may wrap: its 64 bits are right, its sign is
    not."""
    product = word * multiplier
    if isinstance(product, Tensor):
        return (product >> 32) & _MASK, product & _MASK
    return product >> 32, product & _MASK


def words_of_ids(ids: Tensor, seed: int, choice: int, position: int) -> Tensor:
    """Return one 32-bit word per id (int64, same shape): the draw of (seed, choice, position) for that id alone.

    The counter is (id // 4, position, choice, 0) and the word is id % 4 of its four, so no two ids share a word and an
    id's word doesn't depend on which other ids are requested.
    """
    words = philox4x32((ids >> 2, position & _MASK, choice & _MASK, position >> 32), split_key(seed))
    stacked = torch.stack([_as_tensor(word, ids) for word in words])
    return stacked.gather(0, (ids & 3).unsqueeze(0)).squeeze(0)


def words_of_range(count: int, seed: int, choice: int, position: int, device: torch.device) -> Tensor:
    """Return ``words_of_ids(arange(count), ...)``; each counter is computed once for its four ids."""
    counters = torch.arange((count + 3) // 4, device=device)
    words = philox4x32((counters, position & _MASK, choice & _MASK, position >> 32), split_key(seed))
    return torch.stack([_as_tensor(word, counters) for word in words], dim=1).flatten()[:count]


def words_of_rows(count: int, keys: Sequence[DrawKey], device: torch.device) -> Tensor:
    """Return ``words_of_range(count, *key)`` for each key, a row each."""
    counters = torch.arange((count + 3) // 4, device=device)
    key, (choice, low, high) = _lanes(keys, counters)
    words = philox4x32((counters, low, choice, high), key)
    return torch.stack([_as_tensor(word, counters) for word in words], dim=2).flatten(1)[:, :count]


def _lanes(keys: Sequence[DrawKey], like: Tensor) -> tuple[tuple[Word, Word], tuple[Word, Word, Word]]:
    """Return the words of the keys as columns: the two of the seeds, then choices, and positions low and high."""
    words = [(*split_key(seed), choice & _MASK, position & _MASK, position >> 32) for seed, choice, position in keys]
    k0, k1, choice, low, high = torch.tensor(words, dtype=torch.int64, device=like.device).T.unsqueeze(2)
    return (k0, k1), (choice, low, high)


def split_key(seed: int) -> tuple[int, int]:
    """Split a 64-bit seed into its low and high 32 bits."""
    return seed & _MASK, (seed >> 32) & _MASK


def _as_tensor(word: Word, like: Tensor) -> Tensor:
    return word if isinstance(word, Tensor) else torch.full_like(like, word)
